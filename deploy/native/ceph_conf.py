"""ceph.conf of a cluster with one monitor and one OSD, and no replica."""

from pathlib import Path

# radosgw would make them itself, one slow step after the other, on its first requests.
POOLS = (
    ".rgw.root",
    "default.rgw.log",
    "default.rgw.control",
    "default.rgw.meta",
    "default.rgw.buckets.index",
    "default.rgw.buckets.data",
    "default.rgw.buckets.non-ec",
)
_DISK_BYTES = 16 << 30  # a sparse file: takes what is stored, not this


def ceph_conf(folder: Path, *, fsid: str, mon_port: int, port: int) -> str:
    """The text of ceph.conf; the monitor listens at `mon_port`, the gateway at `port`, both on 127.0.0.1."""
    everyone = {
        "fsid": fsid,
        "mon host": f"v1:127.0.0.1:{mon_port}",
        "ms bind msgr2": "false",
        "public addr": "127.0.0.1",
        "auth cluster required": "none",
        "auth service required": "none",
        "auth client required": "none",
        "osd pool default size": "1",
        "osd pool default min size": "1",
        "osd pool default pg num": "4",
        "osd pool default pgp num": "4",
        "osd pool default pg autoscale mode": "off",
        "osd crush chooseleaf type": "0",
        "mon allow pool size one": "true",
        "mon warn on pool no redundancy": "false",
        "mon max pg per osd": "1000",
        "mon data avail warn": "1",
        "mon data avail crit": "1",
        "run dir": str(folder / "run"),
        "log file": str(folder / "$name.log"),
        "admin socket": str(folder / "run/$name.asok"),
        "pid file": str(folder / "run/$name.pid"),
        "keyring": str(folder / "keyring"),
        "mon data": str(folder / "mon"),
        "mgr data": str(folder / "mgr"),
        "osd data": str(folder / "osd"),
        "osd objectstore": "bluestore",
        "bluestore block size": str(_DISK_BYTES),
        # Both would send the monitor a command in the first moments of a first boot, which it refuses now and then.
        "osd class update on start": "false",
        "osd crush update on start": "false",
        "bluestore fsck on mount": "false",
        "osd memory target": str(896 << 20),
    }
    gateway = {
        "rgw frontends": f"beast endpoint=127.0.0.1:{port}",
        "rgw data": str(folder / "rgw"),
        "rgw enable usage log": "false",
        "rgw thread pool size": "32",
        # With a cache, each change of a bucket waits until gateways that were killed have been given up: half a minute.
        "rgw cache enabled": "false",
    }
    sections = {"global": everyone, "client.rgw": gateway}
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
        for name, settings in sections.items()
    )
