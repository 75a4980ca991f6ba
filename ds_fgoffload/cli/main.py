"""The command line ``ds-fgoffload``: reads arguments, and leaves the work to :mod:`ds_fgoffload.cli`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import ds_fgoffload
from ds_fgoffload.cli.output import open_missing_streams, stdout_on_stderr, why_not_writable
from ds_fgoffload.errors import HostPoolError, OffloadConfigError, OffloadStateError
from ds_fgoffload.profiling.recording import RecordingError, StepRecording


class _Commands(TyperGroup):
    """All commands; Ctrl-C ends each with a line, whatever the version of typer."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("interrupted")
            raise typer.Exit(_INTERRUPTED) from None


_INTERRUPTED = 130
app = typer.Typer(
    cls=_Commands,
    help="Fine-grained activation offloading for DeepSpeed: look at a model before, and at the machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # with the values of locals, which can be a training script's secrets
)
errors = Console(stderr=True)
launcher_arguments: list[str] = []
"""What a launcher has put in front of the command, for the script."""


def _tell_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"ds-fgoffload {ds_fgoffload.__version__}\n")
        raise typer.Exit


def _writable(file: Path | None) -> Path | None:
    """Refuses, before any work, a file that could not be written after it."""
    if file is None or str(file) == "-":
        return file
    fault = why_not_writable(file)
    if fault is not None:
        raise typer.BadParameter(f"{file}: {fault}")
    return file


@app.callback()
def _every_command(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    pass


@app.command(
    options_metavar="[OPTIONS] [SCRIPT [ARGS]...]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Several ranks: deepspeed --num_gpus 2 --module ds_fgoffload.cli.main inspect train.py ...; rank 0 tells.",
)
def inspect(
    context: typer.Context,
    transformers: Annotated[
        str | None,
        typer.Option(metavar="TYPE|PATH", help="Instead of a script: a model type such as qwen3, or a config.json."),
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --transformers: a key of its config.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="With --transformers: tokens of a sequence.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="With --transformers: sequences of a micro-batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="With --transformers: of the weights.")] = "bfloat16",
    *,
    checkpointing: Annotated[bool, typer.Option(help="With --transformers: gradient checkpointing.")] = False,
    micro_batches: Annotated[int, typer.Option(min=1, help="How many to run; the last one is shown.")] = 2,
    pattern: Annotated[
        list[str] | None, typer.Option("--pattern", "-p", help="Also say what this pattern would move. Repeatable.")
    ] = None,
    min_tensor_bytes: Annotated[
        str | None,
        typer.Option(help="Smaller storages stay. Default: as in the script's section, else 1MiB.", show_default=False),
    ] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Levels of the tree to show. Default: all.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", callback=_writable, help="Also write all of it as JSON; - for the screen."
        ),
    ] = None,
) -> None:
    """Show what a model saves for backward, and what each pattern would move.

    Runs a few micro-batches of YOUR SCRIPT, whose arguments follow it, and watches the first DeepSpeed engine it makes;
    nothing is offloaded, and the script is ended after them:

        ds-fgoffload inspect train.py --deepspeed_config ds_config.json

    Or builds a model of transformers with random weights (two layers tell as much as all):

        ds-fgoffload inspect --transformers qwen3 --set num_hidden_layers=2 --tokens 4096
    """
    from ds_fgoffload.cli import inspect as command
    from ds_fgoffload.cli import inspect_view as view
    from ds_fgoffload.cli.random_model import RandomModel
    from ds_fgoffload.text.messages import rank
    from ds_fgoffload.text.sizes import parse_size

    try:
        asked_bytes = None if min_tensor_bytes is None else parse_size(min_tensor_bytes)
    except ValueError as error:
        raise typer.BadParameter(f"--min-tensor-bytes {min_tensor_bytes}: allowed: {error}") from None
    _check_what_is_run(transformers, context.args)
    here = Path.cwd()  # a script may go elsewhere
    failure: command.RunFailedError | None = None
    wrong: OffloadConfigError | None = None
    inspection: command.Inspection | None
    doing = "running the script" if transformers is None else "importing"
    json_alone = str(json_file) == "-"
    around = stdout_on_stderr() if json_alone else nullcontext()
    with errors.status(doing, spinner="dots") as status, around:
        progress = command.Progress(_tell, status.update)
        try:
            if transformers is not None:
                model = RandomModel(transformers, _settings(override or []), tokens, batch, dtype, checkpointing)
                inspection = command.inspect_transformers(model, micro_batches, progress)
            else:
                inspection = command.inspect_script([*launcher_arguments, *context.args], micro_batches, progress)
        except command.RunFailedError as error:
            failure, inspection = error, error.inspection
    if failure is not None:
        errors.print(failure.traceback, end="", markup=False, highlight=False, soft_wrap=True)
    if inspection is not None and not rank():
        least = inspection.least(asked_bytes)
        asked, wrong = view.asked_for(inspection, pattern or [], least)
        if not json_alone:
            _console().print(view.show(inspection, asked, least, depth))
        if json_file is not None:
            _write(json_file if json_alone else here / json_file, view.as_json(inspection, asked, least))
    if failure is not None:
        raise failure
    if wrong is not None:
        raise wrong


@app.command()
def doctor(
    *,
    measure: Annotated[bool, typer.Option(help="Measure the link and pinning; takes a few seconds.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: pinned memory, limits, shared memory, the link, versions, and say what to do.

    Exit code 0: nothing in the way. 1: something will not work. 2: it works, but slower or with less than it could.
    """
    from ds_fgoffload.cli import doctor as command

    with errors.status("measuring", spinner="dots"):
        findings = command.examine(measure=measure)
    if as_json:
        sys.stdout.write(command.as_json(findings) + "\n")
    else:
        _console().print(command.table(findings))
    raise typer.Exit(command.exit_code(findings))


@app.command()
def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    *,
    once: Annotated[bool, typer.Option(help="Look once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once, and print it as JSON.")] = False,
) -> None:
    """Watch the host pools of your ranks on this node: pinned, on lease, limits. Ctrl-C ends it."""
    from ds_fgoffload.cli import top as command

    if as_json:
        sys.stdout.write(command.as_json(command.alive()) + "\n")
    else:
        command.watch(_console(), every, once=once)


@app.command()
def plan(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE [OTHER]", help="A plan file (key plan_file). Two are compared.", show_default=False
        ),
    ],
    max_overhead: Annotated[
        str | None, typer.Option(metavar="PART", help="Time that may be added: 0.01, 1%, or none.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="By how much the peak is to fall: 8GB, or none.", show_default=False),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the device: the peak has to stay below it.", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="To the host, either way: 25GB/s, or 0.5x what was measured."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a micro-batch: sequences times length. Default: the most known.")
    ] = None,
    *,
    expand: Annotated[bool, typer.Option("--expand", help="A row for each unit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON, with every place.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=_writable, help="Also draw what time buys, as .svg or .png."),
    ] = None,
) -> None:
    """Show the plan of a plan file, and what it would be with another link, device, size or allowed time.

    Nothing is run, and no GPU is needed. What no option says is as in the run that wrote the file:

        ds-fgoffload plan plans.json --link 25GB/s --device-memory 80GB

    Two files are compared; one file given twice is compared with itself under the options:

        ds-fgoffload plan plans.json plans.json --tokens 16384
    """
    from ds_fgoffload.cli import plan as command
    from ds_fgoffload.cli import plan_view as view

    if len(files) > 2:
        raise typer.BadParameter(f"give one plan file, or two to compare: got {len(files)}")
    if picture is not None and picture.suffix not in view.PICTURES:
        raise typer.BadParameter(f"--picture {picture}: allowed: a name that ends in {' or '.join(view.PICTURES)}")
    with errors.status("planning", spinner="dots"):
        found = command.plans(files, command.Asked(max_overhead, target, device_memory, link, tokens))
    if picture is not None:
        view.draw(found, picture)
    if as_json:
        sys.stdout.write((view.as_json(*found) if len(found) == 1 else view.both_as_json(*found)) + "\n")
    else:
        _console().print(view.show(*found, expand=expand) if len(found) == 1 else view.show_both(*found, expand=expand))
    if picture is not None:
        errors.print(f"wrote {picture}", highlight=False)


@app.command()
def draw(
    recording: Annotated[
        Path | None, typer.Argument(help="A step that was recorded, as JSON.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(callback=_writable, help="The page.")] = Path("step.html"),
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=_writable, help="Also write a Chrome trace, for Perfetto or chrome://tracing."
        ),
    ] = None,
    *,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw the step that comes with the package; no file is needed.")
    ] = False,
) -> None:
    """Draw a recorded step: memory over time with and without offloading, copies, and where compute waited.

    The page is one file that fetches nothing. ds_fgoffload.get(engine).record("step.json") has the next step recorded,
    on an accelerator. Without one, this draws a step that comes with the package:

        ds-fgoffload draw --sample
    """
    from ds_fgoffload.cli import sample as made_by_hand
    from ds_fgoffload.reporting.chrome_trace import chrome_trace
    from ds_fgoffload.reporting.page import page

    if sample == (recording is not None):
        raise typer.BadParameter("give either the file of a recorded step, or --sample")
    step = made_by_hand.recording() if recording is None else StepRecording.read(recording)
    _write(out, page(step))
    errors.print(f"wrote {out}", highlight=False)
    if trace is not None:
        _write(trace, chrome_trace(step))
        errors.print(f"wrote {trace}", highlight=False)


def main() -> None:
    """Errors of users are told without a traceback."""
    open_missing_streams()
    arguments = sys.argv[1:]
    while arguments and arguments[0].startswith("--local"):  # launchers put it in front
        launcher_arguments.append(arguments.pop(0))
    try:
        app(arguments)
    except (OffloadConfigError, OffloadStateError, HostPoolError, RecordingError) as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))
    finally:
        launcher_arguments.clear()


def _console() -> Console:
    """Where there is no terminal, tables have the room that they need."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _tell(line: str) -> None:
    """Rank 0 does, beside what the script prints."""
    from ds_fgoffload.text.messages import rank

    if not rank():
        errors.print(line, markup=False, highlight=False, soft_wrap=True)


def _write(file: Path, text: str) -> None:
    try:
        if str(file) == "-":
            sys.stdout.write(f"{text}\n")
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OffloadStateError(f"{file} cannot be written: {error.strerror or error}; give another path") from error


def _check_what_is_run(transformers: str | None, arguments: list[str]) -> None:
    if transformers is None and not arguments:
        raise typer.BadParameter("give a script, or --transformers TYPE")
    if transformers is not None and arguments:
        raise typer.BadParameter(f"give a script or --transformers, not both: got {' '.join(arguments)} too")


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"--set {pair}: allowed: KEY=VALUE, such as num_hidden_layers=2")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


if __name__ == "__main__":
    main()
