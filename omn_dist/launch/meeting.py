"""Exchange of short messages between the machines of a run, before and after they train.

The messages go through a small store on the first machine, in rounds. All members get the messages
of all members. So each of them comes to the same conclusion, and all stop where something is wrong.
"""

import contextlib
import datetime
import json
import socket
import time
from typing import Any

from torch.distributed import DistError

from omn_dist.train.meeting_point import MissingMembersError, open_store

_POLL_SECONDS = 0.1


class Meeting:
    """One member of a meeting. All members call :meth:`exchange` the same number of times.

    Args:
        address: name or address of the machine of member 0.
        port: port on which member 0 listens.
        member: number of this member.
        num_members: number of members of the meeting.
        seconds: longest wait for the others.

    Raises:
        MeetingPointError: member 0 cannot listen.
        MissingMembersError: member 0 cannot be reached.
    """

    def __init__(self, address: str, port: int, *, member: int, num_members: int, seconds: float) -> None:
        self._member, self._num_members, self._seconds = member, num_members, seconds
        self._address, self._round = f"{address}:{port}", 0
        try:
            self._store = open_store(
                address,
                port,
                serve=member == 0,
                deadline=time.monotonic() + seconds,
                timeout=datetime.timedelta(seconds=seconds),
            )
        except MissingMembersError as error:
            raise MissingMembersError(
                f"meeting at {self._address}: member {member} of {num_members} on {socket.gethostname()} found nobody within "
                f"{seconds:g} s ({error}), expected machine 0; check MASTER_ADDR, that machine 0 is up, and that no firewall "
                "blocks the port"
            ) from None

    def exchange(self, fact: Any) -> list[Any]:
        """Send a fact to all members, and wait for theirs. Collective: all members must call.

        Args:
            fact: JSON types.

        Returns:
            The facts of all members, in the order of members.

        Raises:
            MissingMembersError: some members did not send theirs in time, whose numbers are in the
                message; or member 0 has ended.
        """
        try:
            return self._collect(self._send(fact))
        except (DistError, ConnectionError) as error:
            raise MissingMembersError(
                f"meeting at {self._address}: member 0 has ended ({type(error).__name__}), expected it until all have met; its "
                "output says why"
            ) from None

    def _collect(self, keys: list[str]) -> list[Any]:
        deadline = time.monotonic() + self._seconds
        # Not one long wait in the store: signal handlers only run between Python instructions.
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [member for member, key in enumerate(keys) if not self._store.check([key])]
                raise MissingMembersError(
                    f"meeting at {self._address}: found {self._num_members - len(missing)} of {self._num_members} members within "
                    f"{self._seconds:g} s, missing {missing}; check that the run was started on every machine"
                )
            time.sleep(_POLL_SECONDS)
        return [json.loads(self._store.get(key)) for key in keys]

    def leave(self, fact: Any, seconds: float) -> list[Any]:
        """The last :meth:`exchange`; it raises nothing.

        Args:
            fact: JSON types.
            seconds: longest wait for the others.

        Returns:
            This member's fact, then those that arrived in time.
        """
        facts = [fact]
        deadline = time.monotonic() + seconds
        # The store fails when member 0 has ended.
        with contextlib.suppress(DistError, RuntimeError):
            keys = self._send(fact)
            missing = [key for key in keys if key != keys[self._member]]
            while missing and time.monotonic() < deadline:
                arrived = [key for key in missing if self._store.check([key])]
                facts += [json.loads(self._store.get(key)) for key in arrived]
                missing = [key for key in missing if key not in arrived]
                time.sleep(_POLL_SECONDS)
            # The store ends with member 0, which therefore waits until the others have read.
            self._store.add("done", 1)
            while self._member == 0 and time.monotonic() < deadline and self._store.add("done", 0) < self._num_members:
                time.sleep(_POLL_SECONDS)
        return facts

    def _send(self, fact: Any) -> list[str]:
        keys = [f"{self._round}/{member}" for member in range(self._num_members)]
        self._store.set(keys[self._member], json.dumps(fact))
        self._round += 1
        return keys
