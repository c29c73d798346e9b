"""The doctor's host checks: each with a good and a bad result, and its repair."""

import os
import socket
import sys
from collections import namedtuple

import psutil
import pytest

from meshwright.run.doctor import host_checks
from meshwright.run.doctor.host_checks import Finding, disk_finding, host_findings, port_finding

Usage = namedtuple("Usage", "total used free")
GIB = host_checks.GIB


def by_name(folder, interface=None) -> dict[str, Finding]:
    return {finding.name: finding for finding in host_findings(folder, folder, interface)}


def test_every_question_has_one_answer_and_every_bad_one_a_repair(tmp_path):
    findings = list(host_findings(tmp_path / "runs" / "new", tmp_path))
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    asked = {
        "Python",
        "torch",
        "transformers",
        "cores",
        "memory",
        "clock",
        "host name",
        "interfaces",
        "exposure",
        "port",
    }
    assert asked | {"disk of runs", "disk of caches"} <= set(names)
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in findings)
    assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"


def test_versions_are_held_against_what_is_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(host_checks, "version", {"torch": "2.9.1+cpu", "transformers": "5.1.0rc1"}.get)
    assert host_checks._package("torch", (2, 11)) == Finding(
        "torch", "failure", "2.9.1+cpu; needed is 2.11 or later", "pip install 'torch>=2.11'"
    )
    assert host_checks._package("transformers", (5,)).level == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert host_checks._python().level == "failure"


def test_a_package_that_is_missing_is_a_failure():
    assert host_checks._package("no-such-package-at-all", (1,)).text == "not installed; needed is 1 or later"


@pytest.mark.parametrize(
    ("free", "outcome"), [(100 * GIB, "ok"), (5 * GIB, "warning"), (GIB // 4, "failure")]
)
def test_a_full_disk_is_worse_than_a_small_one(free, outcome, monkeypatch, tmp_path):
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda place: Usage(200 * GIB, 0, free))
    assert disk_finding("disk of runs", tmp_path / "a" / "b").level == outcome


def test_a_folder_that_cannot_be_written_to_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert disk_finding("disk of runs", tmp_path).text == f"{tmp_path} cannot be written to"


def test_a_small_shared_memory_names_the_option_of_the_container(monkeypatch, tmp_path):
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda place: Usage(2**26, 0, 2**26))
    assert "--shm-size" in host_checks._shared_memory(tmp_path).fix
    assert host_checks._shared_memory(tmp_path / "none").level == "warning"


def test_little_memory_and_many_others_are_warnings(monkeypatch):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: namedtuple("Memory", "total available")(8 * GIB, GIB)
    )
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    assert (host_checks._memory().level, host_checks._cores().level) == ("warning", "warning")


def test_a_clock_that_is_behind_the_files_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(host_checks.time, "time", lambda: 1.0)
    found = host_checks._file_clock(tmp_path)
    assert found.level == "warning"
    assert "NTP" in found.fix


def test_a_host_name_without_an_address_is_named(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = host_checks._host_name()
    assert (found.level, found.text) == ("warning", "'no-such-host.invalid' does not resolve")


def test_an_interface_that_gloo_is_told_and_that_is_not_there_is_a_failure(tmp_path):
    assert by_name(tmp_path, "eth77")["interfaces"].level == "failure"
    assert by_name(tmp_path, host_checks.loopback_interface())["interfaces"].level == "ok"


def test_a_port_in_use_is_told_with_another():
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1]
        found = port_finding(number)
        assert (found.level, found.fix.split(",")[0]) == ("warning", f"export MASTER_PORT={number + 1}")
    assert port_finding(number).level == "ok"


def test_a_socket_on_all_interfaces_counts_as_open():
    with socket.create_server(("127.0.0.1", 0)) as private, socket.create_server(("0.0.0.0", 0)) as public:
        open_ports = host_checks._list_listening_ports()
        assert public.getsockname()[1] in open_ports
        assert private.getsockname()[1] not in open_ports
