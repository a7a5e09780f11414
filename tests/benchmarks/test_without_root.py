"""Where this is not root: a user namespace gives the rights, and where that is refused, a relay is offered."""

import os
from pathlib import Path

import pytest

from support.processes import run_python
from thinwire.tools import cli
from thinwire.tools.links import lab, network


def test_a_user_namespace_is_enough_for_a_lab() -> None:
    reason = lab.what_is_missing()
    if reason is not None:
        pytest.skip(reason)
    limit = Path("/proc/sys/user/max_user_namespaces")
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if not limit.exists() or limit.read_text() == "0\n" or (restricted.exists() and restricted.read_text() != "0\n"):
        pytest.skip("this machine's kernel does not allow user namespaces")
    # What the child imports is imported before it gives its rights up: it may not be allowed to read it afterwards.
    drop = "os.setgroups([]); os.setgid(65534); os.setuid(65534)" if os.geteuid() == 0 else "pass"
    dumpable = "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)"  # else /proc/self stays root's
    seen = run_python(
        f"""
        import ctypes, encodings.idna, os, sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from thinwire.tools.links.lab import Lab
        from thinwire.tools.links.network import prepare
        from support.transfer import Transfer
        {drop}
        {dumpable}
        assert os.geteuid(), "still root"
        prepare()
        with Lab(2, 100e6) as made:
            done = Transfer(made, 100_000)
            print(done.received, done.counted > 100_000)
            print(sorted(os.listdir("/run/netns")) == sorted(made.links.namespaces))
        print(os.listdir("/run/netns"))
        """
    )
    assert seen.splitlines() == ["100000 True", "True", "[]"]


def test_what_cannot_be_had_is_said_in_one_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise OSError("the kernel refuses a user namespace (unshare: Operation not permitted)")

    monkeypatch.setattr(lab, "what_is_missing", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network, "become_root", refuse)
    assert cli.main(["bench", "link"]) == 2
    error = capsys.readouterr().err
    assert "no links by network namespaces: the kernel refuses a user namespace" in error
    assert "--relay needs no rights and no tools" in error
    assert error.count("\n") == 1
    monkeypatch.setattr(lab, "what_is_missing", lambda: "ip and tc not found: install iproute2")
    assert cli.main(["bench", "link"]) == 2
    assert "ip and tc not found: install iproute2; --relay" in capsys.readouterr().err


def test_rates_that_a_relay_is_too_slow_for_are_no_default_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "link", "--relay", "--help"])
    assert "10gbit" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["bench", "link", "--help"])
    assert "10gbit" in capsys.readouterr().out
