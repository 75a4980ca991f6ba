"""What backward needs next, as tables: what happens, and, after the arrow, what is foreseen.

``b2`` is what site ``b`` saved in micro-batch 2.
"""

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ds_fgoffload.schedule.order import LONGEST_ROUND, NeedOrder
from ds_fgoffload.schedule.plan import Plan, Site, Verb
from ds_fgoffload.schedule.schedule import Schedule


class Story:
    """A :class:`NeedOrder` to which the lines of a table happen."""

    def __init__(self):
        self.order = NeedOrder()
        self.places = {}

    def tell(self, event):
        """Carries out one line; returns what is to the right of its arrow."""
        verb, *words = event.split()
        if verb == "begin":
            self.order.micro_batch_began(int(words[0]))
        elif verb == "backward":
            self.order.backward_began(int(words[0]))
        elif verb == "next":
            return self.order.next_key(int(words[0])) or "-"
        elif verb == "fetch":
            return " ".join(self.fetch(int(words[0]))) or "-"
        else:
            for key in words:
                getattr(self, verb)(key, int(key[1:]))
        return ""

    def save(self, key, micro_batch):
        self.keep(key, micro_batch)
        self.leave(key, micro_batch)

    def keep(self, key, micro_batch):
        self.places[key] = self.order.saved(micro_batch, Site(key[0], 0, 0))

    def leave(self, key, micro_batch):
        self.order.left(key, micro_batch, self.places[key])

    def need(self, key, micro_batch):
        self.order.needed(micro_batch, self.places[key], late=False)

    def late(self, key, micro_batch):
        self.order.came_back(key, self.places[key])
        self.order.needed(micro_batch, self.places[key], late=True)

    def die(self, key, micro_batch):
        self.order.died(key, micro_batch, self.places.pop(key))

    def use(self, key, micro_batch):
        self.need(key, micro_batch)
        self.die(key, micro_batch)

    def fetch(self, micro_batch):
        """All that is foreseen comes back."""
        while (key := self.order.next_key(micro_batch)) is not None:
            self.order.came_back(key, self.places[key])
            yield key


def check(*tables):
    story = Story()
    for table in tables:
        lines = [line.strip() for line in table.strip().splitlines()]
        events = [line.partition("->")[0].strip() for line in lines]
        assert [f"{event} -> {answer}" if (answer := story.tell(event)) else event for event in events] == lines
    return story


ACCUMULATION = """
    begin 1
    save a1 b1 c1
    backward 1
    use b1 c1 a1
"""
"""A micro-batch that needs what it saved in the order b, c, a."""

TWO_IN_FLIGHT = """
    begin 1
    save a1 b1
    begin 2
    save a2 b2
    backward 1
    use b1 a1
    begin 3
    save a3 b3
    backward 2
    use b2 a2
    backward 3
    use b3 a3
"""
"""The first of two stages in 1F1B, three micro-batches."""


def test_before_anything_is_learned_what_was_saved_last_is_next():
    check(
        """
        begin 1
        save a1 b1
        begin 2
        save a2 b2 c2
        backward 1
        next 1 -> b1
        next 2 -> c2
        fetch 1 -> b1 a1
        fetch 2 -> c2 b2 a2
        """
    )


def test_the_order_of_the_last_round_is_foreseen_in_the_next():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2 b2 c2
        backward 2
        next 2 -> b2
        fetch 2 -> b2 c2 a2
        """,
    )


def test_what_is_on_the_device_is_passed_over():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2
        keep b2
        save c2
        backward 2
        fetch 2 -> c2 a2
        use b2
        """,
    )


def test_what_leaves_the_device_after_it_was_passed_over_is_foreseen_all_the_same():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2
        keep b2
        save c2
        backward 2
        next 2 -> c2
        leave b2
        fetch 2 -> b2 c2 a2
        """,
    )


def test_micro_batches_in_flight_are_told_apart():
    check(
        TWO_IN_FLIGHT,
        """
        begin 4
        save a4 b4
        begin 5
        save a5 b5
        backward 4
        fetch 4 -> b4 a4 b5 a5
        use b4 a4
        begin 6
        save a6 b6
        fetch 5 -> b6 a6
        """,
    )


def test_what_comes_back_for_the_next_micro_batch_does_so_before_its_backward_begins():
    check(
        TWO_IN_FLIGHT,
        """
        begin 4
        save a4 b4
        begin 5
        save a5 b5
        backward 4
        use b4 a4
        next 4 -> b5
        """,
    )


def test_a_place_whose_forward_is_still_to_come_stops_the_look_ahead():
    check(
        """
        begin 1
        save a1
        begin 2
        save a2
        backward 1
        use a1
        begin 3
        save a3 b3
        backward 3
        use b3
        backward 2
        use a2 a3
        """,
        # The third's b comes before the second's a, so that the latter has to wait until the third has begun.
        """
        begin 4
        save a4
        begin 5
        save a5
        backward 4
        fetch 4 -> a4
        next 4 -> -
        begin 6
        save a6 b6
        fetch 5 -> b6 a5 a6
        """,
    )


def test_a_round_ends_when_every_micro_batch_is_in_backward_or_gone():
    check(
        """
        begin 1
        save a1 b1
        begin 2
        save a2 b2
        backward 2
        die a1 b1
        """,
        # The second is alive, but in backward; what it needs from now on is no part of the new round.
        """
        begin 3
        save a3 b3
        use b2 a2
        use a3 b3
        begin 4
        save a4 b4
        fetch 4 -> a4 b4
        """,
    )


def test_a_round_goes_on_while_a_forward_has_not_gone_backward():
    story = check(TWO_IN_FLIGHT, "begin 4\nsave a4\nbegin 5\nsave a5\nbackward 4\nuse a4\nbegin 6\nsave a6")
    assert [story.places[key].ordinal for key in ("a5", "a6")] == [1, 2]


def test_a_late_need_is_where_the_look_ahead_goes_on():
    check(
        """
        begin 1
        save a1 b1 c1 d1
        backward 1
        use d1 c1 b1 a1
        begin 2
        save a2 b2 c2 d2
        backward 2
        next 2 -> d2
        late c2
        fetch 2 -> b2 a2 d2
        """
    )


def test_a_deviation_is_learned():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2 b2 c2
        backward 2
        late a2
        late c2
        late b2
        die a2 b2 c2
        begin 3
        save a3 b3 c3
        fetch 3 -> a3 c3 b3
        """,
    )


def test_fewer_micro_batches_than_before():
    check(
        TWO_IN_FLIGHT,
        """
        begin 4
        save a4 b4
        backward 4
        fetch 4 -> b4 a4
        use b4 a4
        begin 5
        save a5 b5
        backward 5
        fetch 5 -> b5 a5
        """,
    )


def test_more_micro_batches_than_before_come_back_last_saved_first():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2 b2 c2
        begin 3
        save a3 b3 c3
        backward 2
        fetch 2 -> b2 c2 a2
        use b2 c2 a2
        backward 3
        fetch 3 -> c3 b3 a3
        """,
    )


def test_what_is_not_saved_this_time_is_passed_over():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2 b2
        backward 2
        fetch 2 -> b2 a2
        """,
    )


def test_what_was_not_saved_before_comes_after_what_was():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2 b2 c2 x2 y2
        backward 2
        fetch 2 -> b2 c2 a2 y2 x2
        """,
    )


def test_what_is_saved_again_is_needed_earlier_as_long_as_nothing_is_learned():
    check(
        """
        begin 1
        save a1 b1 c1
        leave a1
        fetch 1 -> a1 c1 b1
        """
    )


def test_a_graph_that_outlives_its_round_hides_nothing_of_the_next():
    check(
        ACCUMULATION,
        """
        begin 2
        save a2 b2 c2
        backward 2
        use b2 c2
        begin 3
        save a3 b3 c3
        die a2
        fetch 3 -> b3 c3 a3
        """,
    )


def test_a_graph_that_outlives_its_round_does_not_pass_for_a_forward_of_the_next():
    check(
        TWO_IN_FLIGHT,
        """
        begin 4
        save a4 b4
        begin 5
        save a5 b5
        backward 4
        use b4 a4
        begin 6
        save a6 b6
        backward 5
        use b5 a5
        backward 6
        use b6
        """,
        # a6 stays alive
        """
        begin 7
        save a7 b7
        begin 8
        save a8 b8
        backward 7
        fetch 7 -> b7 a7 b8 a8
        use b7 a7
        begin 9
        save a9 b9
        fetch 8 -> b9
        """,
    )


def test_a_graph_that_is_kept_for_ever_is_not_waited_for():
    story = Story()
    for event in ("begin 1", "save a1 b1"):
        story.tell(event)
    for micro_batch in range(2, LONGEST_ROUND + 4):
        story.tell(f"begin {micro_batch}")
        story.tell(f"save a{micro_batch} b{micro_batch}")
        foreseen = story.tell(f"next {micro_batch}")
        # Until the first is given up, its round goes on, and nothing is learned.
        assert foreseen == (f"a{micro_batch}" if micro_batch > LONGEST_ROUND + 1 else f"b{micro_batch}")
        story.tell(f"use a{micro_batch} b{micro_batch}")


def sizes(order):
    return {name: len(value) for name, value in vars(order).items() if hasattr(value, "__len__")}


def test_nothing_grows_with_the_number_of_rounds():
    story = Story()
    after = []
    for step in range(2000):
        first, second, third = range(3 * step + 1, 3 * step + 4)
        for line in TWO_IN_FLIGHT.replace("1", "x").replace("2", "y").replace("3", "z").strip().splitlines():
            story.tell(line.replace("x", str(first)).replace("y", str(second)).replace("z", str(third)))
        after.append(sizes(story.order))
    assert after[1] == after[-1]
    assert {name: size for name, size in after[1].items() if size} == {
        "_ordinals": 3,
        "_recorded": 6,
        "_learned": 6,
        "_positions": 6,
    }


def test_a_graph_that_is_kept_for_ever_costs_no_more_than_a_long_round():
    story = Story()
    story.tell("begin 1")
    story.tell("save a1")
    largest = 0
    for micro_batch in range(2, 3 * LONGEST_ROUND):
        for event in ("begin", "save a", "use a"):
            story.tell(f"{event}{'' if event[-1] == 'a' else ' '}{micro_batch}")
        largest = max(largest, *sizes(story.order).values())
    assert largest == LONGEST_ROUND
    assert sum(sizes(story.order).values()) < 10


EVENTS = st.sampled_from(["begin", "save", "save", "keep", "leave", "backward", "need", "need", "die", "fetch"])


class AnyStory(Story):
    """Knows what it has put on the host and on the device, and does what can be done there."""

    def __init__(self):
        super().__init__()
        self.newest, self.on_host, self.on_device = 0, set(), set()
        self.go_on("begin", 0)

    def go_on(self, verb, choice):
        """Lets ``verb`` happen to the micro-batch or storage that ``choice`` falls on."""
        alive = sorted(self.on_host | self.on_device)
        if verb == "begin":
            self.newest += 1
            self.tell(f"begin {self.newest}")
        elif verb in {"backward", "fetch"}:
            came_back = set(self.tell(f"{verb} {1 + choice % self.newest}").split()) - {"-"}
            self.on_host -= came_back
            self.on_device |= came_back
        elif verb in {"save", "keep"}:
            key = f"{'abc'[choice % 3]}{self.newest}"
            if key not in alive:
                self.touch(verb, key)
        elif alive:
            self.touch(verb, alive[choice % len(alive)])

    def touch(self, verb, key):
        if verb == "need" and key in self.on_host:
            verb = "late"
        self.tell(f"{verb} {key}")
        self.on_host.discard(key)
        self.on_device.discard(key)
        if verb != "die":
            (self.on_host if verb in {"save", "leave"} else self.on_device).add(key)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 1 << 10)), max_size=120))
def test_whatever_happens_only_what_is_on_the_host_is_foreseen(events):
    story = AnyStory()
    for verb, choice in events:
        story.go_on(verb, choice)
        foreseen = {story.order.next_key(micro_batch) for micro_batch in range(1, story.newest + 1)}
        assert foreseen <= story.on_host | {None}
    for key in sorted(story.on_host | story.on_device):
        story.tell(f"die {key}")
    left = sizes(story.order)
    assert [left[name] for name in ("_alive", "_in_backward", "_on_host", "_stacks")] == [0, 0, 0, 0]


class Stage:
    """A pipeline stage that saves and needs as one does, on its :class:`Schedule`.

    Args:
        instructions: DeepSpeed's own for this stage and step.
        layers: calls of units in a micro-batch.
        sizes_bytes: of the parcels that each saves.
        outputs: backward goes over the whole graph once for each.
        streams: False as on CPU, where what is copied is released at once.
    """

    def __init__(self, instructions, *, layers, sizes_bytes, outputs, streams):
        self.instructions = instructions
        self.layers, self.sizes_bytes, self.outputs = layers, sizes_bytes, outputs
        self.schedule = Schedule(Plan(), synchronous=not streams)
        self.late = 0
        self.ahead_of_backward = 0
        self._on_host = set()
        self._in_flight = {}
        self._dead = []
        self._micro_batch = self._key = 0

    def step(self):
        for commands in self.instructions.steps():
            for command in commands:
                if isinstance(command, deepspeed_schedule.ForwardPass):
                    self._forward(command)
                elif isinstance(command, deepspeed_schedule.BackwardPass):
                    self._backward(command)
        self._process_deaths()
        assert not self._on_host

    def _forward(self, command):
        self._process_deaths()
        self._micro_batch += 1
        self.schedule.micro_batch_began(self._micro_batch)
        keys = []
        for layer in range(self.layers):
            for save, size_bytes in enumerate(self.sizes_bytes):
                self._key += 1
                keys.append(self._key)
                site = Site(f"{command.kwargs.get('phase')}.{layer}", 0, save)
                self._carry_out(self.schedule.saved(self._key, site, size_bytes, self._micro_batch))
            self.schedule.scope_closed(self._micro_batch, "unit", 0, sum(self.sizes_bytes))
        self._in_flight[command.buffer_id] = (self._micro_batch, keys)

    def _backward(self, command):
        micro_batch, keys = self._in_flight.pop(command.buffer_id)
        self._process_deaths()
        self.ahead_of_backward += keys[-1] not in self._on_host
        self._carry_out(self.schedule.backward_began(micro_batch))
        for output in range(self.outputs):
            for key in reversed(keys):
                self._process_deaths()
                self.late += key in self._on_host
                self._carry_out(self.schedule.needed(key))
                if output == self.outputs - 1:
                    self._dead.append(key)

    def _process_deaths(self):
        while self._dead:
            self._carry_out(self.schedule.died(self._dead.pop(0)))

    def _carry_out(self, acts):
        for verb, key in acts:
            if verb is Verb.RELEASE:
                self._on_host.add(key)
            elif verb is Verb.RELOAD:
                self._on_host.remove(key)


PIPELINES = [
    *((deepspeed_schedule.TrainSchedule, stages, micro_batches) for stages in (1, 2, 4) for micro_batches in (1, 2, 6)),
    *((deepspeed_schedule.DualPipeVSchedule, ranks, micro_batches) for ranks in (2, 4) for micro_batches in (8, 9)),
]


@pytest.mark.parametrize("streams", [False, True], ids=["cpu", "streams"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("sizes_bytes", [(10,), (10, 40, 5)], ids=str)
@pytest.mark.parametrize(
    ("kind", "stages", "micro_batches"), PIPELINES, ids=[f"{kind.__name__}-{s}-{m}" for kind, s, m in PIPELINES]
)
def test_no_reload_is_late_after_the_first_step(kind, stages, micro_batches, sizes_bytes, outputs, streams):
    for stage_id in range(stages):
        for layers in (4, 12):
            instructions = kind(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
            stage = Stage(instructions, layers=layers, sizes_bytes=sizes_bytes, outputs=outputs, streams=streams)
            stage.step()
            stage.late = 0
            for _ in range(4):
                stage.step()
            assert stage.late == 0, f"stage {stage_id}, {layers} layers"


def test_the_next_micro_batch_comes_back_while_the_engine_waits_for_its_neighbour():
    instructions = deepspeed_schedule.TrainSchedule(micro_batches=6, stages=4, stage_id=0)
    stage = Stage(instructions, layers=6, sizes_bytes=(10,), outputs=1, streams=False)
    stage.step()
    assert stage.ahead_of_backward == 0
    stage.step()
    assert stage.ahead_of_backward == 5  # all but the first, whose backward nothing goes before


def test_what_is_needed_first_comes_back_as_backward_begins_although_the_rest_never_left():
    schedule = Schedule(Plan(release_window_bytes=10, prefetch_window_bytes=100), synchronous=False)
    acts = []
    for micro_batch in (1, 2):
        first, second = (f"{site}{micro_batch}" for site in "ab")
        schedule.micro_batch_began(micro_batch)
        for key in (first, second):
            schedule.saved(key, Site(key[0], 0, 0), 10, micro_batch)
        acts.append(schedule.backward_began(micro_batch))
        for key in (first, second):
            schedule.needed(key)
            schedule.died(key)
    assert acts == [[], [(Verb.RELOAD, "a2")]]
