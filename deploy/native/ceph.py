"""Ceph's S3 gateway on one machine, a real and durable S3 server: a monitor, a manager, an OSD on a file, radosgw."""

import json
import shutil
import signal
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from deploy.native.ceph_conf import POOLS, ceph_conf
from deploy.native.failure import NotInstalledError, ServiceError
from deploy.native.folder import prepare, remove
from deploy.native.ports import accepts, free_port
from deploy.native.process import Command, Process, run_as
from deploy.native.s3 import S3Endpoint, local_environment

_PROGRAMS = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")
_OSD_TRIES, _OSD_PATIENCE_S = 5, 8.0


class Ceph:
    """One cluster of one machine, about 700 MiB of memory. What was acknowledged survives `kill`."""

    def __init__(
        self, folder: Path, *, port: int | None = None, mon_port: int | None = None, outlive: bool = False
    ) -> None:
        self.folder = folder.absolute()
        self.port = port or free_port()
        self._mon_port = mon_port or free_port()  # like `port` written into what is stored: the same at each start
        self.endpoint = S3Endpoint(
            url=f"http://127.0.0.1:{self.port}", access_key="NIGHTMILL", secret_key="nightmill-native"
        )
        self._orphan_signal = None if outlive else signal.SIGKILL
        self._mon = self._process("ceph-mon", "-f", "-i", "a", f"--public-addr=127.0.0.1:{self._mon_port}")
        self._mgr = self._process("ceph-mgr", "-f", "-i", "x")
        self._osd = self._process("ceph-osd", "-f", "-i", "0")
        self._gateway = self._process("radosgw", "-f", "-n", "client.rgw")

    @property
    def processes(self) -> list[Process]:
        """The daemons, in the order in which they are to be stopped."""
        return [self._gateway, self._osd, self._mgr, self._mon]

    @property
    def gateway(self) -> Process:
        """radosgw, the one that clients talk to."""
        return self._gateway

    @property
    def running(self) -> bool:
        """Whether all four daemons are there."""
        return all(process.running for process in self.processes)

    def start(self) -> "Ceph":
        """Start it; returns when the gateway answers and our keys are in force (15 s; 6 s with stored data)."""
        for program in _PROGRAMS:
            if shutil.which(program) is None:
                raise NotInstalledError(f"Ceph's {program}")
        new = not (self.folder / "made").exists()
        if new:
            self._make_monitor()
        self._mon.start()
        self._mon.wait_until(lambda: accepts(self._mon_port), timeout_s=30)
        if new:
            self._make_osd()
        self._mgr.start()
        self._start_osd()
        if new:
            self._run("ceph", stdin="".join(f"osd pool create {pool} 4\n" for pool in POOLS))
        self.start_gateway()
        if new:
            self._make_user()
            (self.folder / "made").touch()
        return self

    def start_gateway(self) -> None:
        """Start radosgw alone; the rest of the cluster runs."""
        self._gateway.start()
        self._gateway.wait_until(self._answers, timeout_s=90)

    def stop(self) -> None:
        """End the daemons in order."""
        for process in self.processes:
            process.stop(grace_s=20)

    def kill(self) -> None:
        """SIGKILL all four."""
        for process in self.processes:
            process.kill()

    def restart(self) -> None:
        """Stop (if it runs) and start again with what it stored."""
        self.stop()
        self.start()

    def _make_monitor(self) -> None:
        remove(self.folder)  # what a start that failed half way has left
        prepare(self.folder, None)
        for name in ("mon", "mgr", "osd", "rgw", "run"):
            (self.folder / name).mkdir()
        fsid = str(uuid.uuid4())
        conf = ceph_conf(self.folder, fsid=fsid, mon_port=self._mon_port, port=self.port)
        (self.folder / "ceph.conf").write_text(conf)
        (self.folder / "keyring").touch()
        address, monmap = f"[v1:127.0.0.1:{self._mon_port}]", str(self.folder / "monmap")
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", address, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)

    def _make_osd(self) -> None:
        osd = str(uuid.uuid4())
        self._run("ceph", stdin=f"osd new {osd} 0\nosd crush add osd.0 1.0 root=default\n")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)

    def _start_osd(self) -> None:
        """An OSD whose first boot goes wrong stays down for good: then start it again."""
        before = self._osd_up_from()
        for _ in range(_OSD_TRIES):
            self._osd.start()
            deadline = time.monotonic() + _OSD_PATIENCE_S
            while self._osd.running and time.monotonic() < deadline:
                if self._osd_up_from() > before:
                    return
            self._osd.kill()
        raise ServiceError(f"the OSD did not come up in {_OSD_TRIES} tries; see {self._osd.command.log}")

    def _osd_up_from(self) -> int:
        """The epoch at which the OSD came up last. After a kill the map still calls it up, with the epoch of before."""
        dump = json.loads(self._run("ceph", "osd", "dump", "--format=json"))
        return max((int(osd["up_from"]) for osd in dump["osds"] if osd["up"]), default=0)

    def _make_user(self) -> None:
        keys = (f"--access-key={self.endpoint.access_key}", f"--secret={self.endpoint.secret_key}")
        user = ("user", "create", "--uid=nightmill", "--display-name=nightmill")
        self._run("radosgw-admin", "-n", "client.rgw", *user, *keys)

    def _answers(self) -> bool:
        """Without a key it says 403 or lists no bucket: both are an answer, 5xx is not."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(self.endpoint.url, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code < 500
        except OSError:
            return False
        return True

    def _run(self, program: str, *arguments: str, stdin: str | None = None) -> str:
        """Run one of Ceph's tools to its end; "problem getting command descriptions" passes, so try a few times."""
        command = self._command(program, [program, *arguments])
        for _ in range(4):
            done = run_as(command, timeout_s=120, stdin=stdin)
            if done.returncode == 0:
                return done.stdout
            time.sleep(0.5)
        raise ServiceError(f"{' '.join(command.argv)} failed:\n{done.stdout[-500:]}{done.stderr[-1500:]}")

    def _process(self, program: str, *arguments: str) -> Process:
        return Process(self._command(program, [program, *arguments]))

    def _command(self, name: str, argv: list[str]) -> Command:
        return Command(
            name=name,
            argv=argv,
            env=local_environment() | {"CEPH_CONF": str(self.folder / "ceph.conf")},
            cwd=self.folder,
            log=self.folder / f"{name}.out",
            orphan_signal=self._orphan_signal,
        )
