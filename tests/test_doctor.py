"""`headwater doctor`: what it finds, and the fix for what is missing."""

import socket

from headwater.cli import doctor, main


def test_doctor_reports_every_part_and_exits_0_where_the_server_can_run(capsys):
    """Each part has a line, and the last line is the verdict."""
    code = main(["doctor"])

    printed = capsys.readouterr().out
    for what in ("python", "package", "compiler", "cpu", "memory", "gpu", "port", "storage"):
        assert f" {what}" in printed
    assert code == 0
    assert printed.splitlines()[-1].startswith("headwater serve can run: 0 missing")


def test_a_missing_package_has_a_fix_and_exit_code_1(capsys, monkeypatch):
    """The extra to install is named."""
    packages = (("no-such-package", "engine", True, "headwater serve"),)
    monkeypatch.setattr(doctor, "_PACKAGES", packages)

    assert main(["doctor"]) == 1

    printed = capsys.readouterr().out
    assert "no-such-package is not installed" in printed
    assert "fix: pip install 'headwater[engine]'" in printed
    assert "headwater serve cannot run yet: 1 missing" in printed


def test_no_compiler_is_slow_and_not_missing(monkeypatch):
    """The server runs without a compiler; the line says what is slower."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")

    (found,) = doctor.look_at_compiler()

    assert found.verdict == "slow"
    assert "gcc" in found.fix


def test_a_port_in_use_is_named(monkeypatch):
    """The fix names the flag that avoids it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "_PORTS", {port: "headwater serve"})

        (found,) = doctor.look_at_ports()

    assert str(port) in found.detail
    assert "--port" in found.fix
