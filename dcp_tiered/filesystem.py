"""The `tiered` fsspec protocol: looks at a run as a file system, to list what is there.

    fs, path = fsspec.core.url_to_fs("tiered::s3://bucket/run42", tiered={"local": "/mnt/nvme"})
    fs.ls(path)                  # the checkpoints of the run, on both tiers
    fs.ls(f"{path}/step-1000")   # the durable objects of one checkpoint

Reading and writing checkpoints is what `TieredReader` and `TieredWriter` are for.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from fsspec.implementations.chained import ChainedFileSystem

from dcp_tiered import config, stack
from dcp_tiered.errors import InvalidError
from dcp_tiered.format import layout
from dcp_tiered.format.records import Commit, Expired


class TieredFileSystem(ChainedFileSystem):
    """List the checkpoints of one run.

    Args:
        fo: Path of the run below the durable tier's protocol; fsspec passes it from the URL.
        target_protocol: Protocol of the durable tier, None for a run that is local only.
        target_options: Options of that protocol.
        local: Directory on this node's NVMe. Default: `FSSPEC_TIERED_LOCAL`.
        **storage_options: fsspec's own.
    """

    protocol: ClassVar[str] = "tiered"
    cachable = False  # fsspec's instance cache would keep secrets and stale listings alive

    def __init__(
        self,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        local: str | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self._fo = fo
        self._protocol = target_protocol
        self._options = dict(target_options or {})
        self._local = local

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:  # noqa: ARG002, FBT001, FBT002
        """List a run's checkpoints, or the durable objects of one checkpoint, fresh from the tiers.

        Args:
            path: The run as `url_to_fs` gave it, or a checkpoint below it.
            detail: Return dicts with `name`, `size` in bytes and `type` instead of names.
            **kwargs: Ignored.

        Raises:
            FileNotFoundError: There is no such checkpoint.
        """
        run, checkpoint_id = self._split(path)
        built = stack.build(self._settings(run))
        try:
            entries = (
                self._checkpoints(built, run)
                if checkpoint_id is None
                else self._objects(built, run, checkpoint_id)
            )
        finally:
            built.close()
        if not entries and checkpoint_id is not None:
            raise FileNotFoundError(path)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describe a run or one of its checkpoints."""
        run, checkpoint_id = self._split(path)
        if checkpoint_id is not None:
            self.ls(path, **kwargs)
        name = run if checkpoint_id is None else f"{run}/{checkpoint_id}"
        return {"name": name, "size": 0, "type": "directory"}

    def _split(self, path: str) -> tuple[str, str | None]:
        """Return the run's path and the checkpoint below it."""
        path = self._strip_protocol(path).rstrip("/")
        run = (self._fo or path).rstrip("/")
        if path == run:
            return run, None
        if path.startswith(f"{run}/"):
            return run, layout.check_checkpoint_id(path.removeprefix(f"{run}/"))
        raise InvalidError(f"{path!r} is not part of the run {run!r}")

    def _settings(self, run: str) -> config.Settings:
        url = f"tiered::{self._protocol}://{run}" if self._protocol else f"tiered://{run}"
        options = {self._protocol: self._options} if self._protocol else {}
        return config.settings(url, self._local, options)

    def _checkpoints(self, built: stack.Stack, run: str) -> list[dict[str, Any]]:
        catalog = built.catalog
        found = {name: catalog.published(name) for name in catalog.local_ids()}
        heads = {name: one.head for name, one in found.items() if one is not None}
        sizes = {name: head.bytes_stored() for name, head in heads.items()}
        if built.durable is not None:
            for checkpoint_id, state in catalog.states().items():
                if isinstance(state, Commit):
                    sizes[checkpoint_id] = state.bytes_stored
                elif (
                    isinstance(state, Expired)
                    and (head := heads.get(checkpoint_id)) is not None
                    and catalog.is_expired(head)
                ):
                    del sizes[checkpoint_id]
        return [
            {"name": f"{run}/{name}", "size": size, "type": "directory"}
            for name, size in sorted(sizes.items())
        ]

    def _objects(self, built: stack.Stack, run: str, checkpoint_id: str) -> list[dict[str, Any]]:
        tier = built.durable or built.local
        if tier is None:
            return []
        return [
            {"name": f"{run}/{key}", "size": tier.head(key).length, "type": "file"}
            for key in sorted(tier.list_keys(checkpoint_id))
        ]
