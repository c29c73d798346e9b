"""Network interfaces of the host that runs the tests."""

from ipaddress import ip_address

import psutil

from meshwright.run.launch import network_interfaces
from meshwright.run.launch.network_interfaces import (
    NetworkInterface,
    interface_to,
    list_interfaces,
    loopback_interface,
    resolve_host,
)


def test_the_loopback_is_an_interface_that_is_up():
    found = {each.name: each.address for each in list_interfaces()}
    assert loopback_interface() in found


def test_an_interface_that_is_down_is_left_out(monkeypatch):
    stats = {name: stat._replace(isup=False) for name, stat in psutil.net_if_stats().items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert list(list_interfaces()) == []


def test_the_way_to_others_is_never_the_loopback(monkeypatch):
    routes = {"vm": "127.0.1.1", network_interfaces.EXTERNAL_ADDRESS: "10.1.2.3", "b": "10.1.2.4"}
    monkeypatch.setattr(network_interfaces, "_source_address", lambda target: ip_address(routes[target]))
    lan = NetworkInterface("eth7", ip_address("10.1.2.3"), 1000)
    fast = NetworkInterface("ib0", ip_address("10.1.2.4"), 1000)
    monkeypatch.setattr(
        network_interfaces,
        "list_interfaces",
        lambda: iter([NetworkInterface("lo", ip_address("127.0.0.1"), 0), lan, fast]),
    )
    assert interface_to("vm") == "eth7"
    assert interface_to("b") == "ib0"


def test_without_a_way_out_there_is_no_interface(monkeypatch):
    monkeypatch.setattr(network_interfaces, "_source_address", lambda target: None)
    assert interface_to("b") is None


def test_names_are_resolved_or_not():
    assert resolve_host("localhost").is_loopback
    assert resolve_host("no-such-host.invalid") is None
