use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;

use super::error::ApiError;
use super::server::App;

/// Which callers are let in at all. A hostile page may point a name of its own at this machine (DNS rebinding) or
/// post to it from elsewhere, so browsers must come from a listed page or from this server under a trusted name,
/// and on a loopback address nobody may use any other name.
pub(super) struct Door {
    loopback: bool,
    names: Vec<String>,
    origins: Vec<HeaderValue>,
}

impl Door {
    /// `names` are trusted beside addresses and `localhost`.
    pub(super) fn new(loopback: bool, names: &[String], origins: Vec<HeaderValue>) -> Self {
        Self { loopback, names: names.iter().map(|name| name.to_ascii_lowercase()).collect(), origins }
    }

    fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let mut hosts = headers.get_all(header::HOST).iter();
        // Browsers always send it: what does not is no browser.
        let host = hosts.next();
        if hosts.next().is_some() {
            return Err(ApiError::invalid("the request has more than one `Host` header"));
        }
        let trusted = host.is_none_or(|host| self.trusts(host));
        if self.loopback && !trusted {
            let message = "the `Host` header does not name this machine; allow a name with --allow-host";
            return Err(ApiError::forbidden(message));
        }
        for origin in headers.get_all(header::ORIGIN) {
            let same = trusted && is_same(origin, host);
            if !same && !self.origins.contains(origin) {
                let message = "the `Origin` of this page is not allowed; allow it with --cors-origin";
                return Err(ApiError::forbidden(message));
            }
        }
        Ok(())
    }

    fn trusts(&self, host: &HeaderValue) -> bool {
        let Ok(authority) = Authority::try_from(host.as_bytes()) else { return false };
        let name = authority.host().to_ascii_lowercase();
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(&name);
        match address.parse::<IpAddr>() {
            Ok(address) => address.is_loopback() || !self.loopback,
            Err(_) => name == "localhost" || self.names.contains(&name),
        }
    }
}

/// Whether a page comes from the server that `host` names.
fn is_same(origin: &HeaderValue, host: Option<&HeaderValue>) -> bool {
    let bare = origin.as_bytes().strip_prefix(b"http://").or(origin.as_bytes().strip_prefix(b"https://"));
    matches!((bare, host), (Some(bare), Some(host)) if bare == host.as_bytes())
}

/// Turns callers away that the door is closed to.
pub(super) async fn admit(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    app.door.check(request.headers())?;
    Ok(next.run(request).await)
}

/// Asks for the API key, if there is one. `/health` tells nothing and needs none.
pub(super) async fn authenticate(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Some(key) = &app.api_key
        && request.uri().path() != "/health"
    {
        let header = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let given = header.and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        if !given.is_some_and(|given| is_equal(given, key.as_bytes())) {
            return Err(ApiError::unauthorized());
        }
    }
    Ok(next.run(request).await)
}

/// Compares in a time that depends on the lengths only.
fn is_equal(given: &[u8], key: &[u8]) -> bool {
    let mut difference = given.len() ^ key.len();
    for (&a, &b) in given.iter().zip(key) {
        difference |= core::hint::black_box(usize::from(a ^ b));
    }
    difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(host: &str, origin: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, HeaderValue::from_str(origin).unwrap());
        }
        headers
    }

    #[test]
    fn only_names_of_this_machine_pass_on_loopback() {
        let door = Door::new(true, &["Host.Docker.Internal".into()], Vec::new());
        let good =
            ["127.0.0.1:80", "127.1.2.3", "localhost:9", "LOCALHOST", "[::1]:8080", "host.docker.internal:1"];
        for host in good {
            assert!(door.check(&headers(host, None)).is_ok(), "{host}");
        }
        let bad = [
            "evil.com",
            "evil.com:8080",
            "127.0.0.1.evil.com",
            "localhost.evil.com",
            "192.168.0.1",
            "",
            "[::1",
        ];
        for host in bad {
            assert!(door.check(&headers(host, None)).is_err(), "{host}");
        }
        assert!(door.check(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn open_addresses_take_any_name_but_not_from_browsers() {
        let door = Door::new(false, &[], Vec::new());
        assert!(door.check(&headers("box.lan:8080", None)).is_ok());
        assert!(door.check(&headers("192.168.0.1:8080", Some("http://192.168.0.1:8080"))).is_ok());
        assert!(door.check(&headers("evil.com:8080", Some("http://evil.com:8080"))).is_err());
    }

    #[test]
    fn origins_are_listed_or_the_server_itself() {
        let door = Door::new(true, &[], vec![HeaderValue::from_static("https://chat.example")]);
        for origin in ["https://chat.example", "http://localhost:8080"] {
            assert!(door.check(&headers("localhost:8080", Some(origin))).is_ok(), "{origin}");
        }
        let bad = ["https://evil.example", "https://chat.example.evil", "http://localhost:9090", "null", ""];
        for origin in bad {
            assert!(door.check(&headers("localhost:8080", Some(origin))).is_err(), "{origin}");
        }
    }

    #[test]
    fn keys_compare_whole() {
        assert!(is_equal(b"secret", b"secret"));
        for wrong in [&b""[..], b"secre", b"secret1", b"Secret", b"secrex"] {
            assert!(!is_equal(wrong, b"secret"));
        }
    }
}
