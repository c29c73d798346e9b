"""The network of the host that runs the tests: it has a loopback, and whatever else it has is told consistently."""

from ipaddress import ip_address

import psutil

from meshwright.run.launch import network
from meshwright.run.launch.network import Interface, interface_towards, interfaces, loopback, resolved


def test_the_loopback_is_an_interface_that_is_up():
    found = {each.name: each.address for each in interfaces()}
    assert loopback() in found


def test_an_interface_that_is_down_is_left_out(monkeypatch):
    stats = {name: stat._replace(isup=False) for name, stat in psutil.net_if_stats().items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert list(interfaces()) == []


def test_the_way_to_others_is_never_the_loopback(monkeypatch):
    routes = {"vm": "127.0.1.1", network.ELSEWHERE: "10.1.2.3", "b": "10.1.2.4"}
    monkeypatch.setattr(network, "_source_address", lambda target: ip_address(routes[target]))
    lan = Interface("eth7", ip_address("10.1.2.3"), 1000)
    fast = Interface("ib0", ip_address("10.1.2.4"), 1000)
    monkeypatch.setattr(network, "interfaces", lambda: iter([Interface("lo", ip_address("127.0.0.1"), 0), lan, fast]))
    assert interface_towards("vm") == "eth7"
    assert interface_towards("b") == "ib0"


def test_without_a_way_out_there_is_no_interface(monkeypatch):
    monkeypatch.setattr(network, "_source_address", lambda target: None)
    assert interface_towards("b") is None


def test_names_are_resolved_or_not():
    assert resolved("localhost").is_loopback
    assert resolved("no-such-host.invalid") is None
