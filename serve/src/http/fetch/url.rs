use std::net::{IpAddr, Ipv6Addr};

use axum::http::Uri;

/// An `http` address, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) host: Host,
    pub(super) port: u16,
    /// Path and query, as they stand in a request.
    pub(super) target: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Host {
    Address(IpAddr),
    Name(String),
}

/// Bytes of an address at most.
const LENGTH: usize = 4096;

impl Url {
    /// Reads an address; the error is a clause that says what is wrong with it.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > LENGTH {
            return Err("is too long for an address");
        }
        let uri: Uri = text.parse().map_err(|_| "is no valid address")?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err("is an https address, which this build cannot fetch: send a data URL");
            }
            Some(_) => return Err("has a scheme that is not fetched: send a data URL"),
            None => return Err("is no valid address"),
        }
        let authority = uri.authority().ok_or("is an address without a host")?;
        if authority.as_str().contains('@') {
            return Err("is an address with a user name, which is not fetched");
        }
        let port = match authority.as_str()[authority.host().len()..].strip_prefix(':') {
            None => 80,
            Some(port) => port.parse().map_err(|_| "is an address with an invalid port")?,
        };
        let target = match uri.path_and_query().map_or("/", |target| target.as_str()) {
            "" => "/".to_owned(),
            query if query.starts_with('?') => format!("/{query}"),
            target => target.to_owned(),
        };
        Ok(Self { host: Host::parse(authority.host())?, port, target })
    }

    /// Where a redirect from here leads.
    pub(super) fn join(&self, location: &str) -> Result<Self, &'static str> {
        let location = location.split('#').next().unwrap_or_default();
        let has_scheme = location.split(['/', '?']).next().is_some_and(|first| first.contains(':'));
        if has_scheme {
            return Self::parse(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("http://{rest}"));
        }
        let path = self.target.split('?').next().unwrap_or("/");
        let target = match location.as_bytes().first() {
            None => self.target.clone(),
            Some(b'/') => location.to_owned(),
            Some(b'?') => format!("{path}{location}"),
            Some(_) => format!("{}/{location}", path.rsplit_once('/').map_or("", |(folder, _)| folder)),
        };
        Self::parse(&format!("http://{}{target}", self.authority()))
    }

    /// Host and port as the header `Host` has them.
    pub(super) fn authority(&self) -> String {
        let host = match &self.host {
            Host::Address(IpAddr::V6(address)) => format!("[{address}]"),
            Host::Address(IpAddr::V4(address)) => address.to_string(),
            Host::Name(name) => name.clone(),
        };
        if self.port == 80 { host } else { format!("{host}:{}", self.port) }
    }
}

impl Host {
    fn parse(host: &str) -> Result<Self, &'static str> {
        if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            let address: Ipv6Addr = address.parse().map_err(|_| "is an address with an invalid host")?;
            return Ok(Self::Address(address.into()));
        }
        if let Ok(address) = host.parse() {
            return Ok(Self::Address(address));
        }
        let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        if host.is_empty() || host.len() > 253 || !host.bytes().all(valid) {
            return Err("is an address with an invalid host");
        }
        Ok(Self::Name(host.to_ascii_lowercase()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap_or_else(|error| panic!("{text} {error}"))
    }

    #[test]
    fn addresses_are_taken_apart() {
        let whole = url("http://Example.com:8080/a/b.png?c=d&e#part");
        assert_eq!(whole.host, Host::Name("example.com".into()));
        assert_eq!((whole.port, whole.target.as_str()), (8080, "/a/b.png?c=d&e"));
        assert_eq!(whole.authority(), "example.com:8080");
        assert_eq!(url("HTTP://h").target, "/");
        assert_eq!(url("http://h?q").target, "/?q");
        assert_eq!(url("http://h:80/").authority(), "h");
        assert_eq!(url("http://127.0.0.1/").host, Host::Address("127.0.0.1".parse().unwrap()));
        assert_eq!(url("http://[::1]:81/").authority(), "[::1]:81");
        // Old forms of IPv4 addresses are names here: the system resolves them, and the result is checked.
        assert_eq!(url("http://2130706433/").host, Host::Name("2130706433".into()));
        assert_eq!(url("http://0x7f.1/").host, Host::Name("0x7f.1".into()));
    }

    #[test]
    fn what_is_no_plain_http_address_is_refused() {
        for (text, clause) in [
            ("https://example.com/a.png", "https"),
            ("file:///etc/passwd", ""),
            ("ftp://example.com/a.png", "scheme"),
            ("gopher://example.com/", "scheme"),
            ("http://user@example.com/", "user name"),
            ("http://user:secret@example.com/", "user name"),
            ("http://example.com@127.0.0.1/", "user name"),
            ("http://", ""),
            ("http:///a.png", ""),
            ("http://example.com:/", "port"),
            ("http://example.com:99999/", ""),
            ("http://exam ple.com/", "valid"),
            ("http://example.com/\r\nX: y", "valid"),
            ("http://exämple.com/", ""),
            ("http://[fe80::1%25eth0]/", ""),
            ("http://[::1/", ""),
            ("http://a%00b/", ""),
            ("example.com/a.png", ""),
            ("/a.png", ""),
            ("", ""),
        ] {
            let error = Url::parse(text).expect_err(text);
            assert!(error.contains(clause), "{text}: {error}");
        }
        assert!(Url::parse(&format!("http://h/{}", "a".repeat(LENGTH))).is_err());
    }

    #[test]
    fn redirects_lead_where_they_say() {
        let from = url("http://h:81/a/b?c");
        for (location, expected) in [
            ("http://other/x", "http://other/x"),
            ("//other:82/x", "http://other:82/x"),
            ("/x?y#z", "http://h:81/x?y"),
            ("?y", "http://h:81/a/b?y"),
            ("x", "http://h:81/a/x"),
            ("../x", "http://h:81/a/../x"),
            ("", "http://h:81/a/b?c"),
            ("x?u=http://v/", "http://h:81/a/x?u=http://v/"),
        ] {
            assert_eq!(from.join(location).unwrap(), url(expected), "{location}");
        }
        for location in ["https://h/", "file:///etc/passwd", "http://u@h/", "javascript:x", "//u@h/"] {
            assert!(from.join(location).is_err(), "{location}");
        }
    }
}
