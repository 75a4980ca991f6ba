"""One engine's way to the host pool."""

from __future__ import annotations

from typing import Protocol

from ds_fgoffload.budget import mib
from ds_fgoffload.lease import Account, Lease
from ds_fgoffload.pool_stats import HostPoolStats


class _Pool(Protocol):
    @property
    def last_refusal(self) -> str | None: ...

    def lease(self, size_bytes: int, account: Account) -> Lease | None: ...

    def stats(self) -> HostPoolStats: ...

    def remove_user(self, name: str) -> None: ...


class PoolUser:
    """One engine's way to the pool: the same leases, on its own account."""

    def __init__(self, pool: _Pool, name: str, account: Account) -> None:
        self.name = name
        self.account = account
        self.last_refusal: str | None = None
        """Why the latest lease that was refused was refused, and the remedy; ``None`` if none ever was."""
        self._pool = pool
        self._is_there = True

    def lease(self, size_bytes: int) -> Lease | None:
        """As :meth:`~ds_fgoffload.pool.HostPool.lease`, within this user's quota."""
        account, quota_bytes = self.account, self.account.quota_bytes
        if quota_bytes is not None and account.leased_bytes + size_bytes > quota_bytes:
            account.leased_bytes = self._pool.stats().engines[self.name].leased_bytes  # with what came back meanwhile
            if account.leased_bytes + size_bytes > quota_bytes:
                self.last_refusal = (
                    f"the host pool is full for {self.name}: {mib(size_bytes)} asked for, and it has "
                    f"{mib(account.leased_bytes)} of its {mib(quota_bytes)} on lease; raise host_pool.quota_bytes"
                )
                account.refused_leases += 1
                return None
        lease = self._pool.lease(size_bytes, account)
        if lease is None:
            self.last_refusal = self._pool.last_refusal
        return lease

    def leave(self) -> None:
        """Leases no more. May be called by a finalizer, like :meth:`Lease.give_back`; later calls do nothing."""
        if self._is_there:
            self._is_there = False
            self._pool.remove_user(self.name)
