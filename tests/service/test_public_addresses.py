"""Datasets are fetched from public addresses only: IANA's registries row by row, and inner addresses written in IPv6."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from reflogp.service.fetch import check_uri
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings

#: iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry, as printed there, and what else is reserved.
IPV4 = [
    *("0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8"),
    *("169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32"),
    *("192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24"),
    *("192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.88.99.2/32", "192.168.0.0/16"),
    *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
    *("255.255.255.255/32", "224.0.0.0/4", "232.0.0.0/8", "239.0.0.0/8"),
]
IPV6 = [
    *("::1/128", "::/128", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"),
    *("100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:1::1/128"),
    *("2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48"),
    *("2001:10::/28", "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2002::/16"),
    *("2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10"),
    *("fec0::/10", "ff00::/8", "::/96", "::ffff:0:0:0/96", "4000::/3"),
    *("e000::/4", "::/8", "100::/8"),
]
#: Where clouds answer their own machines: AWS and most others, Alibaba, Oracle, Azure, AWS over IPv6.
METADATA = ["169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254", "fe80::a9fe:a9fe"]
INNER = ["127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "192.0.0.192", "100.64.0.1", "0.0.0.0"]
PUBLIC = ["8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0"]
PUBLIC += ["191.255.255.255", "192.0.1.0", "192.0.3.1", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0"]
PUBLIC += ["198.51.99.255", "203.0.112.1", "203.0.114.1", "223.255.255.255", "168.63.129.15"]
PUBLIC += [
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "2001:200::1",
    "2001:db7:ffff::1",
    "2001:db9::1",
    "2003::1",
    "2620:4f:8001::1",
]
ANY = ServerSettings(store="./store", dataset_uris=["https://", "http://"])


def is_allowed(address: IPv4Address | IPv6Address) -> bool:
    host = f"[{address}]" if address.version == 6 else str(address)
    try:
        check_uri(f"https://{host}/a.jsonl", ANY)
    except Problem as problem:
        assert problem.status == 403 and str(address) not in problem.detail
        return False
    return True


@pytest.mark.parametrize("row", IPV4 + IPV6)
def test_no_address_of_a_special_network_is_public(row):
    network = ip_network(row)
    size = network.num_addresses
    for at in {0, size // 3, size // 2, size - 1}:
        assert not is_allowed(network[at]), network[at]


@pytest.mark.parametrize("inner", INNER)
def test_an_inner_address_written_in_ipv6_is_not_public(inner):
    number = int(IPv4Address(inner))
    forms = [
        IPv6Address(number),  # IPv4-compatible
        IPv6Address((0xFFFF << 32) | number),  # IPv4-mapped
        IPv6Address((0xFFFF << 48) | number),  # IPv4-translated
        IPv6Address((0x64FF9B << 96) | number),  # NAT64
        IPv6Address((0x64FF9B0001 << 80) | number),  # NAT64 of a local network
        IPv6Address((0x2002 << 112) | (number << 80)),  # 6to4
        IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF)),  # Teredo
        IPv6Address((0xFE80 << 112) | (0x5EFE << 32) | number),  # ISATAP
    ]
    for address in forms:
        assert not is_allowed(address), address


@pytest.mark.parametrize("address", METADATA)
def test_metadata_of_clouds_is_not_public(address):
    assert not is_allowed(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_neighbours_of_special_networks_are_public(address):
    assert is_allowed(ip_address(address))
