"""The start records of one element of a job array; each element runs one partition of a step.

The directory of the array has the start records that all elements share, and the Pipes context with the keys of all partitions,
in the order of the elements. Each element makes its own start records from these files, so one upload serves all elements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any, Dict, Optional, Tuple

from ..protocol.record import CONTEXT, ENDED, PAYLOAD, SECRETS, write_atomically
from ..protocol.rpc import derive_key
from ..protocol.spec import PayloadSpec, RuntimeSpec, from_json, read_text, to_json
from .partition_runner import PARTITIONS, context_of

KEY = "RAYSLURM_PARTITION_KEY"  # Variable with the key of the payload's partition.


@dataclasses.dataclass(frozen=True)
class Element:
    """One element of a job array, which runs one partition of a Dagster step.

    `key` is the partition's key. `window` is the time window of the partition, a dictionary with start and end; None for a
    partition that stands for no time.
    """

    array_dir: str  # Path of the directory of the whole array.
    number: int  # The element's index in the array, from 0 on, which is Slurm's SLURM_ARRAY_TASK_ID.
    key: str
    window: Optional[Dict[str, str]]
    context: Dict[str, Any]  # The Pipes context that all partitions share.

    @property
    def run_dir(self) -> str:
        """Path of the element's own run directory, which the batch script has created."""
        return os.path.join(self.array_dir, str(self.number))

    def spec(self, spec: RuntimeSpec) -> RuntimeSpec:
        """Returns a copy of `spec`, the start record of the whole array, for the runtime of this element.

        The copy has the element's own cluster id and control key, and the partition key as a variable for Ray workers.
        """
        key = spec.control_key and derive_key(spec.control_key, "element %d" % self.number)
        worker_env = {**spec.worker_env, KEY: self.key}
        cluster_id = "%s-%d" % (spec.cluster_id, self.number)
        return dataclasses.replace(spec, cluster_id=cluster_id, control_key=key, worker_env=worker_env)

    def lay_out(self) -> None:
        """Write the start record, the Pipes context and the secrets of this element's payload into the element's run directory.

        To be called only on the element's first node. Raises OSError if a file cannot be read or written.
        """
        payload = from_json(PayloadSpec, read_text(os.path.join(self.array_dir, PAYLOAD)))
        env = {**payload.env, KEY: self.key}
        payload = dataclasses.replace(payload, nonce="%s-%d" % (payload.nonce, self.number), env=env)
        self._write(PAYLOAD, to_json(payload))
        self._write(CONTEXT, json.dumps(context_of(self.context, self.key, self.window)))
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

    Reads the array's Pipes context. `number` is SLURM_ARRAY_TASK_ID, which counts the partitions from 0. Raises OSError if the
    Pipes context cannot be read, and ValueError if the array has no such element.
    """
    context = json.loads(read_text(os.path.join(array_dir, CONTEXT)))
    partitions: Tuple[Tuple[str, Optional[Dict[str, str]]], ...] = tuple(context.pop(PARTITIONS).items())
    if number >= len(partitions):
        raise ValueError("%s has %d partitions, and none for element %d" % (array_dir, len(partitions), number))
    return Element(array_dir, number, *partitions[number], context)
