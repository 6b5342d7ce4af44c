use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, Method};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::error::ApiError;
use super::guard::{self, Door};
use super::images::{ImageOptions, Reader};
use super::ledger::Ledger;
use super::line;
use super::model::Model;
use super::{chat, completions, models, wire};

/// How a server listens and whom it lets in. [`Options::default`] is loopback only, without a key.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// Address or name to listen on. On a loopback address, requests must also name this machine in `Host`.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// The key clients send as `Authorization: Bearer KEY`.
    pub api_key: Option<String>,
    /// Origins of web pages that may call, each as `scheme://host[:port]`.
    pub cors_origins: Vec<String>,
    /// Names that `Host` may hold beside addresses and `localhost`.
    pub allowed_hosts: Vec<String>,
    /// Refuse requests that name another model than the one served.
    pub strict_model: bool,
    /// Bytes of a request body.
    pub body_limit: usize,
    /// How long a request body may take to arrive.
    pub body_timeout: Duration,
    /// Bytes that request bodies and pictures may occupy, all requests together; more are refused as busy.
    pub memory: usize,
    /// Which pictures are taken.
    pub images: ImageOptions,
    /// How long a stream may be silent before a comment is sent.
    pub keep_alive: Duration,
    /// How long running answers may go on once the server is told to stop.
    pub grace: Duration,
    /// Connections at a time; more wait.
    pub connections: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8080,
            api_key: None,
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            strict_model: false,
            body_limit: 32 << 20,
            body_timeout: Duration::from_secs(120),
            memory: 1 << 30,
            images: ImageOptions::default(),
            keep_alive: Duration::from_secs(10),
            grace: Duration::from_secs(3),
            connections: 512,
        }
    }
}

/// A server that holds its port and does not answer yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    options: Options,
    origins: Vec<HeaderValue>,
}

/// What every request handler sees.
pub(super) struct App {
    pub(super) model: Arc<Model>,
    pub(super) door: Door,
    pub(super) api_key: Option<String>,
    pub(super) strict_model: bool,
    pub(super) body_limit: usize,
    pub(super) body_timeout: Duration,
    pub(super) ledger: Arc<Ledger>,
    pub(super) images: Reader,
    pub(super) keep_alive: Duration,
    pub(super) started: u64,
    /// Turns true when running answers are to end.
    pub(super) stopping: watch::Receiver<bool>,
}

impl Server {
    /// Takes the port.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for an option that cannot be used, else what the system says of the address.
    pub fn bind(options: Options) -> io::Result<Self> {
        let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidInput, message);
        let origin = |origin: &String| {
            let header = HeaderValue::from_str(origin).ok().filter(|_| is_origin(origin));
            header.ok_or_else(|| invalid(format!("`{origin}` is no origin of the form scheme://host[:port]")))
        };
        let origins = options.cors_origins.iter().map(origin).collect::<Result<_, _>>()?;
        if options
            .api_key
            .as_ref()
            .is_some_and(|key| key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()))
        {
            return Err(invalid("the API key must consist of visible ASCII characters".into()));
        }
        let listener = TcpListener::bind((options.host.as_str(), options.port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address, options, origins })
    }

    /// The address that was taken.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until `stop` is done; then takes no more, lets running answers go on for the grace period and
    /// ends them.
    ///
    /// # Errors
    /// When the socket cannot be used.
    pub async fn run(self, model: Arc<Model>, stop: impl Future<Output = ()>) -> io::Result<()> {
        let Self { listener, address, options, origins } = self;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (cancel, stopping) = watch::channel(false);
        let app = Arc::new(App {
            model,
            door: Door::new(address.ip().is_loopback(), &options.allowed_hosts, origins.clone()),
            api_key: options.api_key,
            strict_model: options.strict_model,
            body_limit: options.body_limit,
            body_timeout: options.body_timeout,
            ledger: Arc::new(Ledger::new(options.memory)),
            images: Reader::new(options.images),
            keep_alive: options.keep_alive,
            started: wire::now(),
            stopping,
        });
        let service = TowerToHyperService::new(router(app, origins));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);

        let slots = Arc::new(Semaphore::new(options.connections));
        let graceful = GracefulShutdown::new();
        let mut connections = JoinSet::new();
        let mut stop = pin!(stop);
        loop {
            while connections.try_join_next().is_some() {}
            let next = async {
                let slot = Arc::clone(&slots).acquire_owned().await;
                (slot, listener.accept().await)
            };
            let (slot, accepted) = tokio::select! {
                biased;
                () = &mut stop => break,
                next = next => next,
            };
            let stream: TcpStream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file descriptors, or a connection that died in the queue: neither ends the server.
                    tracing::warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            // Without this, small events wait for the acknowledgement of earlier ones.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!("cannot set TCP_NODELAY: {error}");
            }
            let connection = http.serve_connection(TokioIo::new(stream), service.clone());
            let connection = graceful.watch(connection);
            connections.spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!("a connection ended early: {error}");
                }
                drop(slot);
            });
        }

        drop(listener);
        let mut idle = pin!(graceful.shutdown());
        if timeout(options.grace, &mut idle).await.is_err() {
            cancel.send_replace(true);
            // Time to write the last event; what hangs longer is dropped with the set of connections.
            let _ = timeout(LAST_WORDS, &mut idle).await;
        }
        Ok(())
    }
}

/// How long the head of a request may take, and a connection may be idle.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a cancelled answer may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

fn router(app: Arc<App>, origins: Vec<HeaderValue>) -> Router {
    let not_found = |request: Request| async move { ApiError::not_found(request.uri().path()) };
    let not_allowed = |request: Request| async move {
        ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
    };
    // Layers run from the last to the first.
    let mut router = Router::new()
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/health", get(models::health))
        .fallback(not_found)
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), guard::authenticate));
    if !origins.is_empty() {
        let cors = CorsLayer::new()
            .allow_origin(AllowOrigin::list(origins))
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .max_age(Duration::from_secs(600));
        router = router.layer(cors);
    }
    router
        .layer(from_fn_with_state(Arc::clone(&app), guard::admit))
        .layer(from_fn(line::write))
        .with_state(app)
}

/// Whether a text is an origin as browsers send it: no path, no wildcard.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    !scheme.is_empty() && !host.is_empty() && !host.contains(['/', '*', '?', '#', '@', ' ', ','])
}
