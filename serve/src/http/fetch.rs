//! Pictures from addresses in requests, without lending clients this server's place in the network.

mod address;
mod url;

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::header::{self, HeaderMap};
use axum::http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use self::url::{Host, Url};

/// Fetches what `http` addresses name, from the public internet only.
///
/// Names are resolved here, every address of a name is checked, and the connection goes to a checked address, so that a
/// name cannot change its meaning in between. The same holds for every redirect. Neither proxies nor cookies nor
/// credentials are used.
pub(super) struct Fetcher {
    resolve: Arc<Resolve>,
    permitted: fn(IpAddr) -> bool,
    /// Bytes of a body.
    limit: usize,
    /// Fetches at a time.
    slots: Semaphore,
    /// Look-ups at a time; they cannot be cancelled, and each takes a thread.
    lookups: Arc<Semaphore>,
}

type Resolve = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Redirects that are followed.
const REDIRECTS: usize = 3;
/// Addresses of a name that are tried.
const TRIES: usize = 3;
/// Bytes of the head of a response.
const HEAD: usize = 32 << 10;
const FETCHES: usize = 4;
const LOOKUPS: usize = 2;

/// Whether an address can be fetched as far as it can be told from its text; else a clause that says why not.
pub(super) fn check(address: &str) -> Result<(), &'static str> {
    Url::parse(address).map(drop)
}

impl Fetcher {
    /// A fetcher of bodies of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        let resolve = |host: &str, port: u16| Ok((host, port).to_socket_addrs()?.collect());
        Self::with(Arc::new(resolve), address::is_public, limit)
    }

    fn with(resolve: Arc<Resolve>, permitted: fn(IpAddr) -> bool, limit: usize) -> Self {
        let (slots, lookups) = (Semaphore::new(FETCHES), Arc::new(Semaphore::new(LOOKUPS)));
        Self { resolve, permitted, limit, slots, lookups }
    }

    /// The body behind an address, redirects included, until a point in time. `grow` is told of every further piece of
    /// it, and may refuse.
    ///
    /// The error is a clause about the address, fit for the client.
    pub(super) async fn fetch(
        &self,
        address: &str,
        deadline: Instant,
        mut grow: impl FnMut(usize) -> bool,
    ) -> Result<Vec<u8>, String> {
        let url = Url::parse(address)?;
        let fetch = async {
            let _slot = self.slots.acquire().await.map_err(|_| "cannot be fetched now")?;
            self.follow(url, &mut grow).await
        };
        timeout_at(deadline, fetch).await.unwrap_or_else(|_| Err("was not fetched in time".into()))
    }

    async fn follow(&self, mut url: Url, grow: &mut impl FnMut(usize) -> bool) -> Result<Vec<u8>, String> {
        for _ in 0..=REDIRECTS {
            match self.get(&url, grow).await? {
                Answer::Body(bytes) => return Ok(bytes),
                Answer::Redirect(location) => {
                    url = url.join(&location).map_err(|clause| format!("leads to what {clause}"))?;
                }
            }
        }
        Err(format!("is redirected more than {REDIRECTS} times"))
    }

    async fn get(&self, url: &Url, grow: &mut impl FnMut(usize) -> bool) -> Result<Answer, String> {
        let stream = connect(&self.addresses(url).await?).await?;
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(HEAD)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|_| "is not answered over HTTP")?;
        let request = Request::get(&url.target)
            .header(header::HOST, url.authority())
            .header(header::USER_AGENT, concat!("skep/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "image/png, image/jpeg, image/webp, image/gif")
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::CONNECTION, "close")
            .body(Empty::<Bytes>::new())
            .map_err(|_| "is no valid address")?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|_| "is not answered over HTTP")?;
            self.answer(response, grow).await
        };
        // The connection does the work, but its end may come before the last bytes are taken.
        let drive = async {
            let _ = connection.await;
            std::future::pending().await
        };
        tokio::select! {
            biased;
            answer = exchange => answer,
            never = drive => never,
        }
    }

    /// The addresses of a host, all of them permitted.
    async fn addresses(&self, url: &Url) -> Result<Vec<SocketAddr>, String> {
        let addresses = match &url.host {
            Host::Address(address) => vec![SocketAddr::new(*address, url.port)],
            Host::Name(name) => self.look_up(name.clone(), url.port).await?,
        };
        if addresses.iter().any(|address| !(self.permitted)(address.ip())) {
            return Err("leads to an address that is not public, which is not fetched".into());
        }
        Ok(addresses)
    }

    async fn look_up(&self, name: String, port: u16) -> Result<Vec<SocketAddr>, String> {
        const UNKNOWN: &str = "names a host that cannot be found";
        let slot = Arc::clone(&self.lookups).acquire_owned().await.map_err(|_| UNKNOWN)?;
        let resolve = Arc::clone(&self.resolve);
        let found = tokio::task::spawn_blocking(move || {
            let found = resolve(&name, port);
            drop(slot);
            found
        });
        match found.await {
            Ok(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
            _ => Err(UNKNOWN.into()),
        }
    }

    async fn answer(
        &self,
        response: axum::http::Response<Incoming>,
        grow: &mut impl FnMut(usize) -> bool,
    ) -> Result<Answer, String> {
        let (head, mut body) = response.into_parts();
        match head.status {
            StatusCode::OK => {}
            StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT => return location(&head.headers).map(Answer::Redirect),
            status => return Err(format!("is answered with status {}", status.as_u16())),
        }
        if head.headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
            return Err("is answered in a compressed form that was not asked for".into());
        }
        let too_large = || format!("is larger than {} bytes", self.limit);
        if body.size_hint().lower() > self.limit as u64 {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| "is answered only in part")?;
            let Some(data) = frame.data_ref() else { continue };
            if bytes.len() + data.len() > self.limit {
                return Err(too_large());
            }
            if !grow(data.len()) {
                return Err("finds no room: too many pictures are being read".into());
            }
            bytes.extend_from_slice(data);
        }
        Ok(Answer::Body(bytes))
    }
}

enum Answer {
    Body(Vec<u8>),
    Redirect(String),
}

fn location(headers: &HeaderMap) -> Result<String, String> {
    let location = headers.get(header::LOCATION).and_then(|value| value.to_str().ok());
    location.map(str::to_owned).ok_or_else(|| "is redirected to nowhere".into())
}

async fn connect(addresses: &[SocketAddr]) -> Result<TcpStream, String> {
    for address in addresses.iter().take(TRIES) {
        if let Ok(stream) = TcpStream::connect(address).await {
            return Ok(stream);
        }
    }
    Err("names a host that does not answer".into())
}

#[cfg(test)]
mod tests;
