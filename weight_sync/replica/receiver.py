"""An engine rank's end of a publish: which memory may be written, the proof of what was written, and the commit.

Owns one rank's VersionState, its registered parameter memory, and the proof (byte counts and hashes). Does not own
the engine: the caller does pausing, caches and device synchronization, and passes hooks.

    begin(v, epoch, digest)   state DIRTY; the bytes may change from here on
      ... one-sided writes by the trainer's ranks; this process takes no part ...
    verify(expected)          put changes in, if there are any (landing.py), or merge what arrived (own_merge.py); count
                              and hash the bytes *as they arrived*
    commit(v, epoch)          repack() parameters in place, recompute() derived ones, state CLEAN

A rank that is filled from a peer (`recovery.py`) gets bytes at rest: begin, read, verify_at_rest, adopt.

For a parameter with PostLoad.repack, the bytes that arrive and the bytes at rest differ. It is hashed before it is
repacked; `committed_hashes` has the hash of what it holds afterwards. The next begin() need not unpack it, because a
publish overwrites every byte that is not a declared fill. (So a repack that moves fill bytes is refused.)
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from slipstream.weight_sync.errors import IntegrityError, ProtocolError
from slipstream.weight_sync.integrity import HASH_MASK, RangeHashes, hash_bytes
from slipstream.weight_sync.layout import Binding, DestLayout, PostLoad
from slipstream.weight_sync.merging.factors import is_factor
from slipstream.weight_sync.replica.landing import LandingZone, flags_of, held_digest, zone_name
from slipstream.weight_sync.replica.messages import EngineRank, Expected, Planned
from slipstream.weight_sync.replica.own_merge import OwnMerge
from slipstream.weight_sync.replica.version_state import VersionState
from slipstream.weight_sync.transport.base import Transport
from slipstream.weight_sync.typed_msgpack import Sent

logger = logging.getLogger(__name__)

MAX_NAMED = 5
"""The most wrong parameters that one error names."""


class Receiver:
    """One engine rank's memory and version.

    Args:
        params: Every parameter of `layout`, by name; the live tensors (or Parameters), contiguous.
        layout: What the engine's loader does, as recorded.
        transport: Link under whose session other processes write; the parameters are registered with it here.
        repack: Called at commit with (name, tensor) of every PostLoad.repack parameter: permute its bytes in place.
        recompute: Called once at commit, after all repacking: refresh PostLoad.derived parameters.
        synchronize: Wait until the device is idle; called before bytes may change and before they are read.
        landing_bytes: Memory for changes that come instead of whole parameters; 0: every publish writes every byte.
        own_merge: Merges what arrives, if factors come instead of whole parameters. Its base is read; `layout` and
            `params` are with its factors.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layout: DestLayout,
        transport: Transport,
        *,
        repack: Callable[[str, torch.Tensor], None] | None = None,
        recompute: Callable[[], None] | None = None,
        synchronize: Callable[[], None] | None = None,
        landing_bytes: int = 0,
        own_merge: OwnMerge | None = None,
    ) -> None:
        self._params = dict(params)
        self.layout, self.transport = layout, transport
        """What this rank holds and where it comes from; the link under whose session its parameters are registered."""
        self._repack = repack
        self._recompute, self._synchronize = recompute or _nothing, synchronize or _nothing
        self._state = VersionState()
        self.sent_params = [param for param in layout.params if param.post_load is not PostLoad.derived]
        self._covered = layout.written_ranges()
        self._covered_bytes = layout.written_bytes()
        self._planned = Planned.of(self._covered_bytes)
        self._check_params()
        self._addresses = {param.name: self._params[param.name].data_ptr() for param in self.sent_params}
        self._wire_hashes: dict[str, int] = {}
        self._verified_hashes: dict[str, int] = {}
        self._offered_hashes: dict[str, int] = {}
        self.committed_hashes: dict[str, int] = {}
        """Hash of every parameter's bytes at rest at the last commit, including fills and repacking; for recovery."""
        transport.register([self._params[param.name].detach() for param in self.sent_params])
        self._places = [(param.name, start) for param in self.sent_params for start, _ in self._covered[param.name]]
        self._covered_hashes = RangeHashes(
            [
                self._params[param.name].detach().reshape(-1).view(torch.uint8)[start : start + size]
                for param in self.sent_params
                for start, size in self._covered[param.name]
            ],
            [start for _, start in self._places],
        )
        self._landing = LandingZone(landing_bytes, layout, self._params, transport) if landing_bytes else None
        self._flags = flags_of([param.name for param in self.sent_params], layout)
        self._verified_holds = ""
        """held_digest of what was verified."""
        self._holds: str | None = None
        """... and of what is served; None: begin() has to hash it, because it came from a peer or was there before."""
        self._base = ""
        """... and of what was committed before the present epoch began."""
        self._whole: dict[tuple[tuple[str, int], ...], RangeHashes] = {}
        """The prepared hashing of whole parameters, by names and addresses."""
        self._own_merge = own_merge
        if own_merge is not None:
            own_merge.digest = self._digest_of_memory([not is_factor(param.name) for param in self.sent_params])

    @property
    def state(self) -> VersionState:
        """Serve only while it is serving."""
        return self._state

    def describe(self) -> EngineRank:
        return EngineRank(Sent(self.layout), self._binding(), self.transport.link)

    def enter_thread(self) -> None:
        """Make this rank's GPU the current one of another thread, which is to use the link."""
        for tensor in self._params.values():
            if tensor.is_cuda:
                torch.cuda.set_device(tensor.device)
                return

    def begin(self, version: int, epoch: int, digest: str) -> Binding:
        """Mark the rank DIRTY. The engine must be idle already.

        Returns:
            Where to write. After an epoch that did not commit, the session is a new one: the old one is closed, with
            all that was still in flight towards it.

        Raises:
            StaleEpoch: This epoch, or a later one, has begun before.
            ProtocolError: A parameter moved since its address was registered.
        """
        state = self._state.begin(version, epoch, digest)
        left_open = self._state.epoch > 0 and not self._state.is_serving
        holds = "" if left_open else self._holds
        if self._own_merge is not None:  # whatever the parameters hold, they are merged anew from the base
            holds = self._own_merge.holds
        self._state, self._holds, self._base = state, "", ""
        self._synchronize()
        moved = [name for name, address in self._addresses.items() if self._params[name].data_ptr() != address]
        if moved:
            raise ProtocolError(
                f"{len(moved)} parameters of rank {self.layout.rank} moved since registration ({_names(moved)}):"
                " the engine reloaded or released its weights; restart this replica"
            )
        if left_open:
            self.transport.renew()
        if holds is None:
            holds = "" if self._landing is None else self._digest_of_memory(self._flags)
        self._base = holds
        return replace(self._binding(), holds=self._base)

    def verify(self, version: int, epoch: int, digest: str, expected: Expected) -> None:
        """Prove that every byte of the transaction arrived. If it raises, the state stays DIRTY.

        Raises:
            PlanMismatch: The publisher planned for other parameters.
            ProtocolError: Changes are against another base than this rank held, or out of bounds; none was written.
            IntegrityError: Names the parameters whose bytes are not the sent ones.
        """
        state = self._state.verified(version, epoch, digest)
        counts, hashes = self._planned.read(expected)
        self._check_counts(version, counts)
        self._take_changes(expected, hashes)
        self._synchronize()
        wanted = {} if hashes is None else dict(zip((param.name for param in self.sent_params), hashes, strict=True))
        actual = self._hash_covered() if wanted else {}
        wrong = [name for name, value in actual.items() if value != wanted[name]]
        if wrong:
            shown = "; ".join(self._describe_wrong(n, actual[n], wanted[n]) for n in wrong[:MAX_NAMED])
            raise IntegrityError(
                f"version {version}, epoch {epoch}, rank {self.layout.rank}: {len(wrong)} of {len(self.sent_params)}"
                f" parameters do not hold the bytes that were sent: {shown}"
            )
        if self._own_merge is not None and expected.base:
            self._own_merge.proven()
        self._verified_hashes = actual
        self._verified_holds = "" if self._landing is None else held_digest(expected, self._flags)
        self._state = state

    def commit(self, version: int, epoch: int) -> None:
        """Adopt the verified bytes: set fills, repack, recompute, then CLEAN. If a hook raises, it stays DIRTY."""
        state = self._state.committed(version, epoch)
        self._state = self._state.failed(epoch)
        for fill in self.layout.fills:
            whole = self._params[fill.param].detach().view(-1)
            whole[fill.offset : fill.offset + fill.num_elements].fill_(fill.value)
        for param in self.sent_params:
            if param.post_load is PostLoad.repack and self._repack is not None:
                self._repack(param.name, self._params[param.name])
        self._recompute()
        self._synchronize()
        self._wire_hashes, self._holds = self._verified_hashes, self._verified_holds
        self.committed_hashes = self._hashes_at_rest() if self._wire_hashes else {}
        self._state = state

    def verify_at_rest(self, version: int, epoch: int, digest: str, hashes: Mapping[str, int]) -> None:
        """Prove bytes that came from a peer, in the form that kernels read; derived parameters are computed here first.

        `hashes` are the peer's committed_hashes; empty if hashes are off. Raises IntegrityError with the parameters
        that are not the peer's; then the state stays DIRTY.
        """
        state = self._state.verified(version, epoch, digest)
        self._recompute()
        self._synchronize()
        if hashes:
            names = [param.name for param in self.layout.params]
            actual = self._hash_whole(names)
            wrong = [name for name in names if actual[name] != hashes.get(name)]
            if wrong:
                raise IntegrityError(
                    f"version {version}, epoch {epoch}, rank {self.layout.rank}: {len(wrong)} of {len(names)}"
                    f" parameters read from a peer are not what it committed: {_names(wrong)}"
                )
        self._offered_hashes = dict(hashes)
        self._state = state

    def adopt(self, version: int, epoch: int) -> None:
        """Serve what verify_at_rest proved."""
        self._state = self._state.committed(version, epoch)
        self._wire_hashes, self.committed_hashes, self._holds = {}, self._offered_hashes, None

    def abort(self, epoch: int, reason: str) -> None:
        """Stay DIRTY: the publisher gave up on this epoch. No effect on a committed version."""
        logger.warning("rank %d: epoch %d was aborted: %s", self.layout.rank, epoch, reason)
        self._state = self._state.failed(epoch)

    def invalidate(self) -> None:
        """Mark the rank DIRTY: the caller knows that the bytes are no longer what was committed."""
        self._state = self._state.invalidate()

    def close_landing(self) -> None:
        """Free the memory for changes: every byte is sent from now on."""
        if self._landing is not None:
            self._landing.close()
            self._landing, self._holds = None, ""

    def _binding(self) -> Binding:
        zone = {} if self._landing is None else {zone_name(self._landing.num_bytes): self._landing.address}
        return Binding(self.transport.session, self._addresses | zone)

    def _digest_of_memory(self, flags: Sequence[bool]) -> str:
        hashes = np.array(list(self._hash_covered().values()), np.uint64).view(np.int64)
        return held_digest(self._planned.write(self._planned.num_bytes, hashes), flags)

    def _take_changes(self, expected: Expected, hashes: Sequence[int] | None) -> None:
        """Put what landed into the parameters, or merge it, if it was computed against what this rank held."""
        if not expected.base and not expected.changes:
            return
        base, self._base = self._base, ""
        if (self._landing is None and self._own_merge is None) or not base or expected.base != base:
            raise ProtocolError(
                f"rank {self.layout.rank} got changes against {expected.base[:12] or 'nothing'}, it held"
                f" {base[:12] or 'nothing known'}"
            )
        if self._own_merge is not None:
            names = (param.name for param in self.sent_params)
            self._own_merge.check_factors(dict(zip(names, hashes or (), strict=True)))
            self._own_merge.apply()
        elif self._landing is not None:
            self._landing.apply(expected.changes)

    def _check_params(self) -> None:
        for param in self.layout.params:
            tensor = self._params.get(param.name)
            if tensor is None:
                raise ProtocolError(f"the layout names parameter {param.name}, which the engine does not have")
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tuple(tensor.shape) != param.shape or dtype != param.dtype:
                raise ProtocolError(
                    f"{param.name} is {dtype}{tuple(tensor.shape)}, its layout says {param.dtype}{param.shape}"
                )
            if param.post_load is PostLoad.derived:
                continue
            if not tensor.is_contiguous() or tensor.numel() == 0:
                raise ProtocolError(
                    f"{param.name} cannot be written one-sided: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                )
            if param.post_load is PostLoad.repack:
                if self._repack is None:
                    raise ProtocolError(f"{param.name} is repacked after loading, but no repack hook was given")
                if self._covered_bytes[param.name] != param.num_bytes:
                    raise ProtocolError(
                        f"{param.name} is repacked after loading and has fill bytes, which would not survive"
                    )

    def _check_counts(self, version: int, counts: Sequence[int]) -> None:
        short = [
            f"{name} (sent {sent} of {wanted} bytes)"
            for (name, wanted), sent in zip(self._covered_bytes.items(), counts, strict=True)
            if sent != wanted
        ]
        if short:
            raise IntegrityError(
                f"version {version}, rank {self.layout.rank}: {len(short)} parameters were not sent: {_names(short)}"
            )

    def _hash_covered(self) -> dict[str, int]:
        """Every sent parameter's hash, without fills."""
        total = {param.name: 0 for param in self.sent_params}
        for (name, _), value in zip(self._places, self._covered_hashes.values(), strict=True):
            total[name] = (total[name] + value) & HASH_MASK
        return total

    def _hashes_at_rest(self) -> dict[str, int]:
        """Every parameter's hash in the form that kernels read. Not hashed again if that is the form that arrived."""
        hashes = {
            param.name: self._wire_hashes[param.name]
            for param in self.layout.params
            if param.post_load is PostLoad.identity
            and param.name in self._wire_hashes
            and self._covered[param.name] == [(0, param.num_bytes)]
        }
        return hashes | self._hash_whole([param.name for param in self.layout.params if param.name not in hashes])

    def _hash_whole(self, names: Sequence[str]) -> dict[str, int]:
        """Hashes of whole parameters, with one wait for the device. Those that need a copy are hashed one by one."""
        held = {name: self._params[name].detach() for name in names}
        as_is = {name: tensor for name, tensor in held.items() if tensor.is_contiguous()}
        places = tuple((name, tensor.data_ptr()) for name, tensor in as_is.items())
        if places not in self._whole:  # a table on the device, the same at every commit
            self._whole = {places: RangeHashes(list(as_is.values()), [0] * len(as_is))}
        hashes = dict(zip(as_is, self._whole[places].values(), strict=True))
        return hashes | {name: hash_bytes(held[name].contiguous()) for name in names if name not in as_is}

    def _describe_wrong(self, name: str, actual: int, wanted: int) -> str:
        sources = [load.tensor for load in self.layout.loads if load.param == name]
        shown = (
            f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else (sources[0] if sources else "nothing")
        )
        if self._wire_hashes.get(name) == actual:
            why = "still holds the bytes of the version before: the source changed, the destination did not"
        elif not self._params[name].any():
            why = "is all zeros"
        else:
            why = f"hash {actual:016x}, sent {wanted:016x}"
        return f"{name} (from {shown}) {why}"


def _nothing() -> None: ...


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
