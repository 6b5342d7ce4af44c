use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address belongs to a machine of the public internet, which a request may make this server talk to.
///
/// Everything else is refused: what the IANA registries of special-purpose addresses do not call globally reachable,
/// every form of IPv6 address that leads to an IPv4 address, and the metadata services of clouds.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    /// Networks by their first address and the bits of their prefix.
    const SPECIAL: [(Ipv4Addr, u32); 16] = [
        (Ipv4Addr::new(0, 0, 0, 0), 8),        // this network, unspecified
        (Ipv4Addr::new(10, 0, 0, 0), 8),       // private
        (Ipv4Addr::new(100, 64, 0, 0), 10),    // carrier-grade NAT; metadata of Alibaba Cloud
        (Ipv4Addr::new(127, 0, 0, 0), 8),      // loopback
        (Ipv4Addr::new(168, 63, 129, 16), 32), // platform services of Azure
        (Ipv4Addr::new(169, 254, 0, 0), 16),   // link-local; metadata of most clouds
        (Ipv4Addr::new(172, 16, 0, 0), 12),    // private
        (Ipv4Addr::new(192, 0, 0, 0), 24),     // protocol assignments; metadata of Oracle Cloud
        (Ipv4Addr::new(192, 0, 2, 0), 24),     // documentation
        (Ipv4Addr::new(192, 88, 99, 0), 24),   // relays of 6to4
        (Ipv4Addr::new(192, 168, 0, 0), 16),   // private
        (Ipv4Addr::new(198, 18, 0, 0), 15),    // benchmarks
        (Ipv4Addr::new(198, 51, 100, 0), 24),  // documentation
        (Ipv4Addr::new(203, 0, 113, 0), 24),   // documentation
        (Ipv4Addr::new(224, 0, 0, 0), 4),      // multicast
        (Ipv4Addr::new(240, 0, 0, 0), 4),      // reserved, broadcast
    ];
    let bits = address.to_bits();
    !SPECIAL.iter().any(|(network, prefix)| (bits ^ network.to_bits()) >> (32 - prefix) == 0)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    /// Global unicast. Loopback, mapped and compatible IPv4, NAT64, unique-local, link-local and multicast lie outside.
    const GLOBAL: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
    const SPECIAL: [(Ipv6Addr, u32); 4] = [
        (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23), // protocol assignments, Teredo, benchmarks, ORCHID
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32), // documentation
        (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16), // 6to4
        (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20), // documentation
    ];
    let bits = address.to_bits();
    let within = |(network, prefix): &(Ipv6Addr, u32)| (bits ^ network.to_bits()) >> (128 - prefix) == 0;
    // An interface identifier of ISATAP leads to the IPv4 address in its end.
    let isatap = matches!(address.segments()[4..6], [0 | 0x200, 0x5efe]);
    within(&GLOBAL) && !SPECIAL.iter().any(within) && !isatap
}

#[cfg(test)]
mod tests {
    use super::is_public;

    const REFUSED: &[&str] = &[
        // unspecified, this network
        "0.0.0.0",
        "0.0.0.1",
        "0.255.255.255",
        "::",
        // loopback
        "127.0.0.1",
        "127.1.2.3",
        "127.255.255.255",
        "::1",
        // private, unique-local
        "10.0.0.0",
        "10.255.255.255",
        "172.16.0.0",
        "172.31.255.255",
        "192.168.0.0",
        "192.168.255.255",
        "fc00::1",
        "fd12:3456::1",
        "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        // site-local of old
        "fec0::1",
        // carrier-grade NAT
        "100.64.0.0",
        "100.127.255.255",
        // link-local
        "169.254.0.1",
        "169.254.255.255",
        "fe80::1",
        "febf::1",
        // metadata of clouds
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
        // multicast, reserved, broadcast
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "ff02::1",
        "ff0e::1",
        // documentation, benchmarks, protocols
        "192.0.0.1",
        "192.0.0.255",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.7",
        "203.0.113.9",
        "2001:db8::1",
        "2001:db8:ffff::1",
        "3fff::1",
        "3fff:fff::1",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "2001:1ff:ffff::1",
        // Teredo
        "2001:0:7f00:1::1",
        // IPv4 in IPv6: mapped, translated, compatible, NAT64, 6to4, ISATAP; even of public addresses
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",
        "::127.0.0.1",
        "::8.8.8.8",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::808:808",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::1",
        "2002:a00:1::1",
        "2002:c0a8:101::1",
        "2002:808:808::1",
        "2a00:1450::5efe:10.0.0.1",
        "2a00:1450::200:5efe:10.0.0.1",
        // discard-only, segment routing, unassigned
        "100::1",
        "5f00::1",
        "4000::1",
        "1fff:ffff::1",
        "e000::1",
    ];

    const PUBLIC: &[&str] = &[
        "1.0.0.0",
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "93.184.216.34",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "168.63.129.15",
        "168.63.129.17",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        "192.0.3.0",
        "192.88.98.255",
        "192.88.100.0",
        "192.167.255.255",
        "192.169.0.0",
        "198.17.255.255",
        "198.20.0.0",
        "198.51.99.255",
        "198.51.101.0",
        "203.0.112.255",
        "203.0.114.0",
        "223.255.255.255",
        "2001:200::1",
        "2001:4860:4860::8888",
        "2001:db7::1",
        "2001:db9::1",
        "2003::1",
        "2606:2800:220:1:248:1893:25c8:1946",
        "2a00:1450:4001:80b::200e",
        "3fff:1000::1",
        "3ffe::1",
    ];

    #[test]
    fn only_the_public_internet_is_reached() {
        for address in REFUSED {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in PUBLIC {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }
}
