"""Check whether an IP address is public.

This module has its own list of special-purpose networks, because the list in Python's ipaddress module differs between Python
versions.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

#: All networks in IANA's registries of special-purpose addresses (iana.org/assignments/iana-ipv4-special-registry and
#: iana-ipv6-special-registry, 2025). Networks that IANA calls globally reachable are included too: they are reserved for
#: protocols, so no dataset is served from them. The networks of each registry are followed by special networks that
#: are not in it.
SPECIAL_NETWORKS = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "0.0.0.0/32",  # this host
        "10.0.0.0/8",  # private use
        "100.64.0.0/10",  # shared address space of carriers
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link local; metadata service of most clouds
        "172.16.0.0/12",  # private use
        "192.0.0.0/24",  # IETF protocol assignments; 192.0.0.192 is the metadata service of Oracle's cloud
        "192.0.0.0/29",  # IPv4 service continuity prefix
        "192.0.0.8/32",  # IPv4 dummy address
        "192.0.0.9/32",  # port control protocol anycast
        "192.0.0.10/32",  # TURN anycast
        "192.0.0.170/32",  # NAT64/DNS64 discovery
        "192.0.0.171/32",  # NAT64/DNS64 discovery
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relay anycast, deprecated
        "192.88.99.2/32",  # 6a44 relay anycast
        "192.168.0.0/16",  # private use
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "240.0.0.0/4",  # reserved
        "255.255.255.255/32",  # limited broadcast
        "224.0.0.0/4",  # multicast
        "168.63.129.16/32",  # services on Azure hosts, reachable only from virtual machines
        "::1/128",  # loopback
        "::/128",  # unspecified
        "::ffff:0:0/96",  # IPv4 in IPv6
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64 of a local network
        "100::/64",  # discard only
        "100:0:0:1::/64",  # dummy prefix
        "2001::/23",  # IETF protocol assignments
        "2001::/32",  # Teredo
        "2001:1::1/128",  # port control protocol anycast
        "2001:1::2/128",  # TURN anycast
        "2001:1::3/128",  # DNS-SD anycast
        "2001:2::/48",  # benchmarking
        "2001:3::/32",  # AMT
        "2001:4:112::/48",  # AS112
        "2001:10::/28",  # ORCHID, deprecated
        "2001:20::/28",  # ORCHIDv2
        "2001:30::/28",  # drone remote ID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
        "fc00::/7",  # unique local
        "fe80::/10",  # link local
        "::/96",  # IPv4-compatible, deprecated
        "::ffff:0:0:0/96",  # IPv4-translated
        "fec0::/10",  # site local, deprecated
        "ff00::/8",  # multicast
    )
)
#: The only network from which IANA allocates global IPv6 unicast addresses.
_GLOBAL_UNICAST = IPv6Network("2000::/3")


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an IP address belongs to a host on the public internet."""
    if isinstance(address, IPv6Address) and (address.scope_id is not None or address not in _GLOBAL_UNICAST):
        return False
    kind = IPv4Network if isinstance(address, IPv4Address) else IPv6Network
    if any(isinstance(network, kind) and address in network for network in SPECIAL_NETWORKS):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
