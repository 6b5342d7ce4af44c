//! `skep serve`: the HTTP server from the command line to the last request.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread;

use skep_engine::{Engine, EngineOptions, LoadOptions};
use skep_serve::{Model, Options, Server};
use tokio::sync::oneshot;

use crate::failure::Failure;
use crate::model::{ModelArgs, positive};

/// Answers chats over an OpenAI-compatible HTTP API
#[derive(clap::Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct Args {
    /// Address to listen on; other than loopback is open to the network
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY` [env: SKEP_API_KEY]
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Origin of a web page that may call, as scheme://host[:port]; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Name that requests may use for this machine beside localhost; may be repeated
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Refuse requests that name another model than the one served
    #[arg(long)]
    strict_model: bool,
    /// Fetch pictures that requests name by an http address, if it is one of the public internet
    #[arg(long)]
    allow_image_url: bool,
    /// Answers generated at a time
    #[arg(long, value_name = "N", value_parser = positive, default_value_t = 4)]
    parallel: usize,
    /// Requests that may wait for their turn; more get status 503
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: usize,
    #[command(flatten)]
    model: ModelArgs,
}

pub(crate) fn run(args: Args) -> Result<(), Failure> {
    args.model.check()?;
    let api_key = args.api_key.clone().or_else(|| std::env::var("SKEP_API_KEY").ok());
    let has_key = api_key.is_some();
    let mut options = Options::default();
    options.host = args.host.clone();
    options.port = args.port;
    options.api_key = api_key;
    options.cors_origins = args.cors_origin.clone();
    options.allowed_hosts = args.allow_host.clone();
    options.strict_model = args.strict_model;
    options.images.fetch = args.allow_image_url;
    let server = Server::bind(options).map_err(|error| cannot_listen(&args, &error))?;
    let address = server.address();
    if !address.ip().is_loopback() && !has_key {
        tracing::warn!("{address} is open to the network and asks for no key; set one with --api-key");
    }

    let failed = |error: io::Error| Failure::other(format!("cannot start the server: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Prompts are rendered and tokenized here, pictures decoded and names looked up, beside the engine: a few at a
        // time.
        .max_blocking_threads(8)
        .build()
        .map_err(failed)?;
    let model = Arc::new(Model::loading());
    let engine = runtime.block_on(async {
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = server.run(Arc::clone(&model), async {
            // An error means that the other end is gone, which is the same request.
            let _ = stopped.await;
        });
        tokio::pin!(serving);

        let loading = load(args, Arc::clone(&model)).map_err(failed)?;
        let engine = tokio::select! {
            result = &mut serving => return result.map(|()| None).map_err(failed),
            result = signal() => return result.map(|()| None).map_err(failed),
            engine = loading => match engine {
                Ok(engine) => Arc::new(engine?),
                Err(_) => return Err(Failure::other("loading the model failed")),
            },
        };
        model.ready(Arc::clone(&engine) as _);
        announce(address, has_key);

        tokio::select! {
            result = &mut serving => return result.map(|()| Some(engine)).map_err(failed),
            result = signal() => result.map_err(failed)?,
        }
        tracing::info!("stopping");
        drop(stop);
        tokio::select! {
            result = &mut serving => result.map_err(failed)?,
            // Who asks twice does not want to wait.
            _ = signal() => std::process::exit(130),
        }
        Ok(Some(engine))
    })?;
    if let Some(engine) = engine {
        engine.shutdown();
    }
    Ok(())
}

/// Loads the model on a thread of its own.
fn load(args: Args, model: Arc<Model>) -> io::Result<oneshot::Receiver<Result<Engine, Failure>>> {
    let (sender, receiver) = oneshot::channel();
    thread::Builder::new().name("load".into()).spawn(move || {
        let adjust = |options: &mut LoadOptions| options.sequences = args.parallel;
        let engine =
            args.model.load_watched(adjust, |done, total| model.progress(done, total)).and_then(|runner| {
                let mut options = EngineOptions::default();
                options.queue = args.queue;
                Ok(Engine::start(runner, options)?)
            });
        // Nobody waits any more when the server was stopped meanwhile.
        let _ = sender.send(engine);
    })?;
    Ok(receiver)
}

fn cannot_listen(args: &Args, error: &io::Error) -> Failure {
    let Args { host, port, .. } = args;
    match error.kind() {
        io::ErrorKind::InvalidInput => Failure::usage(error.to_string()),
        io::ErrorKind::AddrInUse => {
            Failure::other(format!("port {port} on {host} is already in use; choose another with --port"))
        }
        _ => Failure::other(format!("cannot listen on {host} port {port}: {error}")),
    }
}

/// Says on stdout where the server listens, and how to try it.
fn announce(address: SocketAddr, has_key: bool) {
    let mut local = address;
    if local.ip().is_unspecified() {
        local.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let key = if has_key { " -H \"authorization: Bearer $SKEP_API_KEY\"" } else { "" };
    let body = r#"{"messages": [{"role": "user", "content": "Hello!"}]}"#;
    let mut out = io::stdout().lock();
    // The server is of use without a reader of its output.
    let _ = writeln!(out, "listening on http://{address}");
    let _ = writeln!(
        out,
        "curl http://{local}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
    );
    let _ = out.flush();
}

/// Waits for Ctrl-C or, where there is one, the signal to terminate.
async fn signal() -> io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            result = tokio::signal::ctrl_c() => result,
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}
