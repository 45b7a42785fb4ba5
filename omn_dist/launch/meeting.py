"""Where the members of a run meet before they train: a small store on the first machine.

Members give each other short facts in rounds. Everybody gets the facts of everybody, so whoever compares them comes to
the same answer, and all stop alike where something does not fit.
"""

import contextlib
import datetime
import json
import socket
import time
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from omn_dist.launch.network import is_free
from omn_dist.settings import SettingsError

_POLL_SECONDS = 0.1


class Meeting:
    """A meeting of ``num_members``. Every member makes one and calls :meth:`exchange` equally often.

    Args:
        address: name or address of the machine of member 0.
        port: where member 0 listens.
        member: this one's number.
        num_members: how many are expected.
        seconds: longest wait for the others.

    Raises:
        SettingsError: member 0 cannot listen, or cannot be reached.
    """

    def __init__(self, address: str, port: int, *, member: int, num_members: int, seconds: float) -> None:
        self._member, self._num_members, self._seconds = member, num_members, seconds
        self._place, self._round = f"{address}:{port}", 0
        if member == 0 and not is_free(port):
            raise SettingsError(
                f"port {port} on {socket.gethostname()}: taken by another program, expected it free for {num_members} members to "
                "meet; set MASTER_PORT to another one"
            )
        try:
            self._store = TCPStore(
                address,
                port,
                is_master=member == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=seconds),
            )
        except (DistError, RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or ["no message"])[0]
            raise SettingsError(
                f"meeting at {self._place}: member {member} of {num_members} on {socket.gethostname()} found nobody within "
                f"{seconds:g} s ({reason[:160]}); check that machine 0 is up and that no firewall closes the port"
            ) from None

    def exchange(self, fact: Any) -> list[Any]:
        """Give ``fact`` (JSON) to all members; the facts of all, by member.

        Raises:
            SettingsError: somebody did not come.
        """
        keys = self._say(fact)
        deadline = time.monotonic() + self._seconds
        # Not one long wait inside the store: a signal has to find Python code to run.
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [member for member, key in enumerate(keys) if not self._store.check([key])]
                raise SettingsError(
                    f"meeting at {self._place}: found {self._num_members - len(missing)} of {self._num_members} members within "
                    f"{self._seconds:g} s, missing {missing}; check that the run was started on every machine"
                )
            time.sleep(_POLL_SECONDS)
        return [json.loads(self._store.get(key)) for key in keys]

    def leave(self, fact: Any, seconds: float) -> list[Any]:
        """Like :meth:`exchange`, for the end: a member that does not come is left out, and nothing is raised."""
        facts = [fact]
        deadline = time.monotonic() + seconds
        with contextlib.suppress(DistError, RuntimeError):  # member 0 is gone, and its store with it
            keys = self._say(fact)
            left = [key for key in keys if key != keys[self._member]]
            while left and time.monotonic() < deadline:
                came = [key for key in left if self._store.check([key])]
                facts += [json.loads(self._store.get(key)) for key in came]
                left = [key for key in left if key not in came]
                time.sleep(_POLL_SECONDS)
            # Member 0 takes the store with it: it goes when the others have read.
            self._store.add("left", 1)
            while self._member == 0 and time.monotonic() < deadline and self._store.add("left", 0) < self._num_members:
                time.sleep(_POLL_SECONDS)
        return facts

    def _say(self, fact: Any) -> list[str]:
        keys = [f"{self._round}/{member}" for member in range(self._num_members)]
        self._store.set(keys[self._member], json.dumps(fact))
        self._round += 1
        return keys
