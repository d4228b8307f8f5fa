"""Makes the start records of one element of a job array; each element runs one chunk of a step's partitions.

Start records are JSON files that tell a runtime what to do, `runtime.json` for the runtime and `payload.json` for a payload. The
directory of the array has the start records that all elements share, and the Pipes context with the chunks, in the order of the
elements. Each element makes its own start records from these files, so one upload serves all elements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any, Dict, List

from ..protocol.record import CONTEXT, ENDED, PAYLOAD, SECRETS, write_atomically
from ..protocol.rpc import derive_key
from ..protocol.spec import PayloadSpec, RuntimeSpec, from_json, read_text, to_json
from .partition_runner import PARTITIONS, Chunk, context_of, lines_of, variables_of

_KEYS = "partition_keys"  # File in the element's run directory with the keys of its partitions, one a line.


@dataclasses.dataclass(frozen=True)
class Element:
    """One element of a job array, which runs one chunk of the partitions of a Dagster step."""

    array_dir: str  # Path of the directory of the whole array.
    number: int  # The element's index in the array, from 0 on, which is Slurm's SLURM_ARRAY_TASK_ID.
    chunk: Chunk
    context: Dict[str, Any]  # The Pipes context that all chunks share.

    @property
    def run_dir(self) -> str:
        """Path of the element's own run directory, which the batch script has created."""
        return os.path.join(self.array_dir, str(self.number))

    @property
    def _variables(self) -> Dict[str, str]:
        return variables_of(self.chunk, os.path.join(self.run_dir, _KEYS))

    def spec(self, spec: RuntimeSpec) -> RuntimeSpec:
        """Returns a copy of `spec`, the start record of the whole array, for the runtime of this element.

        The copy has the element's own cluster id, its own control key (the secret that the runtimes of the element's nodes
        share), and variables that tell Ray workers the partition keys.
        """
        key = spec.control_key and derive_key(spec.control_key, "element %d" % self.number)
        worker_env = {**spec.worker_env, **self._variables}
        cluster_id = "%s-%d" % (spec.cluster_id, self.number)
        return dataclasses.replace(spec, cluster_id=cluster_id, control_key=key, worker_env=worker_env)

    def lay_out(self) -> None:
        """Write the files of this element's payload into the element's run directory.

        The files are the payload's start record, the Pipes context, the partition keys and the secrets, if there are any. To be
        called only on the element's first node. Raises OSError if a file cannot be read or written.
        """
        payload = from_json(PayloadSpec, read_text(os.path.join(self.array_dir, PAYLOAD)))
        env = {**payload.env, **self._variables}
        payload = dataclasses.replace(payload, nonce="%s-%d" % (payload.nonce, self.number), env=env)
        self._write(PAYLOAD, to_json(payload))
        self._write(CONTEXT, json.dumps(context_of(self.context, self.chunk)))
        self._write(_KEYS, lines_of(self.chunk))
        with contextlib.suppress(FileNotFoundError):
            self._write(SECRETS, read_text(os.path.join(self.array_dir, SECRETS)))

    def mark_ended(self) -> None:
        """Create the file that tells Dagster's process that the element's run record is complete; an OSError is ignored."""
        with contextlib.suppress(OSError):  # The batch script also creates the file.
            os.close(os.open(self.run_dir + ENDED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def _write(self, name: str, text: str) -> None:
        write_atomically(os.path.join(self.run_dir, name), text.encode("utf-8", "surrogatepass"))


def find(array_dir: str, number: int) -> Element:
    """Returns the element with the number `number` of the job array whose directory is `array_dir`.

    Reads the array's Pipes context. `number` is SLURM_ARRAY_TASK_ID, which counts the chunks from 0. Raises OSError if the
    Pipes context cannot be read, and ValueError if the array has no such element.
    """
    context = json.loads(read_text(os.path.join(array_dir, CONTEXT)))
    chunks: List[Chunk] = context.pop(PARTITIONS)
    if number >= len(chunks):
        raise ValueError("%s has %d elements, and no element %d" % (array_dir, len(chunks), number))
    return Element(array_dir, number, chunks[number], context)
