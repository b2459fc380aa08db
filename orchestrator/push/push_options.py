"""The flags of `slipstream push`, and the rules between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.errors import ConfigError

DELTA_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    checkpoint: Path
    base: Path | None = None
    start: int = 0
    to: tuple[str, ...] = ()
    tp_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int | None = None
    """None: the first free ones from 8000 on."""
    num_ranks: int | None = None
    num_threads: int = 8
    transport: str = "auto"
    watermark_mib: int = 1024
    delta_mib: int | None = None
    timeout_s: float = 60.0
    start_timeout_s: float = 1800.0
    log_dir: Path = Path("push-logs")
    serve_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.start) == bool(self.to):
            raise ConfigError("push needs either --start N (engines to start here) or --to URL[,URL...] (running ones)")
        if self.port is not None and not 1 <= self.port <= 65536 - max(1, self.start):
            raise ConfigError(f"--port {self.port}: engines take one port each from there, and ports end at 65535")
        if self.base is not None and not self.to:
            raise ConfigError("--base is what running engines (--to) hold; those that --start starts hold nothing yet")
        if self.delta_mib is not None and self.base is None:
            raise ConfigError("--delta-mib has no effect without --base: every byte is sent; remove it, or give --base")
        if self.to and (self.serve_words or self.enable_expert_parallel or self.tp_size != 1):
            raise ConfigError("--tp, --expert-parallel and words after -- shape engines that --start starts, not --to")


def addresses(words: Sequence[str]) -> tuple[str, ...]:
    """The engines that --to names; one word may name several.

    Raises:
        ConfigError: A comma may be one of a user or a password. The message tells neither.
    """
    if any("@" in url and "://" not in url for word in words for url in word.split(",")[1:]):
        raise ConfigError(
            "--to parts addresses at commas: a comma in a user or a password is written %2C, and an address with a "
            "user that stands behind a comma begins with http:// or https://"
        )
    return tuple(url for word in words for url in word.split(",") if url)
