//! A server on a free port, a backend that follows a script, and a client that speaks plain HTTP over a socket.

#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod cases;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::Value;
use skep_engine::{
    Budget, Delta, Error, ErrorKind, Event, FinishReason, Request, Sampling, Sink, Timings, Usage,
};
use skep_serve::{Backend, Card, Model, Options, Server};
use tokio::sync::oneshot;

/// What the scripted backend does with a request, step by step.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    Say(Delta),
    /// Sleeps, but notices when the client goes.
    Wait(Duration),
    /// Waits until the client goes.
    Hold,
    Finish(FinishReason, usize),
    Fail(ErrorKind, &'static str),
}

/// What becomes of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Play {
    /// How long rendering and tokenizing takes.
    pub(crate) admission: Duration,
    pub(crate) refusal: Option<(ErrorKind, &'static str)>,
    /// What the card says of images.
    pub(crate) images: Option<Budget>,
    pub(crate) acts: Vec<Act>,
}

impl Play {
    pub(crate) fn acts(acts: impl Into<Vec<Act>>) -> Self {
        Self { acts: acts.into(), ..Self::default() }
    }

    pub(crate) fn refuse(kind: ErrorKind, message: &'static str) -> Self {
        Self { refusal: Some((kind, message)), ..Self::default() }
    }

    /// The answer `Hello.`
    pub(crate) fn hello() -> Self {
        Self::acts([say("Hel"), say("lo."), Act::Finish(FinishReason::Stop, 3)])
    }
}

pub(crate) fn say(text: &str) -> Act {
    Act::Say(Delta::Content(text.into()))
}

pub(crate) fn think(text: &str) -> Act {
    Act::Say(Delta::Reasoning(text.into()))
}

pub(crate) fn call(index: usize, id: &str, name: &str) -> Act {
    Act::Say(Delta::ToolCallStart { index, id: id.into(), name: name.into() })
}

pub(crate) fn arguments(index: usize, text: &str) -> Act {
    Act::Say(Delta::ToolCallArguments { index, text: text.into() })
}

/// A backend that answers every request by the same script.
pub(crate) struct Script {
    play: Play,
    requests: Mutex<Vec<Request>>,
    ends: mpsc::Sender<End>,
}

/// How the script of one request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// All acts were done.
    Done,
    /// The client was gone, after so many deltas were sent.
    Gone { sent: usize },
}

pub(crate) const PROMPT_TOKENS: usize = 7;
pub(crate) const VOCABULARY: usize = 1000;

impl Backend for Script {
    fn card(&self) -> Card {
        Card { id: "org/scripted model".into(), context: 4096, n_vocab: VOCABULARY, images: self.play.images }
    }

    fn sampling(&self) -> Sampling {
        let mut sampling = Sampling::default();
        sampling.temperature = 0.7;
        sampling.top_k = 20;
        sampling
    }

    fn submit(&self, request: Request, mut sink: Box<dyn Sink>) -> Result<usize, Error> {
        thread::sleep(self.play.admission);
        self.requests.lock().unwrap().push(request);
        if let Some((kind, message)) = self.play.refusal {
            return Err(Error::new(kind, message));
        }
        let (acts, ends) = (self.play.acts.clone(), self.ends.clone());
        thread::spawn(move || {
            let mut sent = 0;
            let done = acts.into_iter().all(|act| perform(act, &mut *sink, &mut sent));
            drop(sink);
            let _ = ends.send(if done { End::Done } else { End::Gone { sent } });
        });
        Ok(PROMPT_TOKENS)
    }
}

/// Whether the script goes on.
fn perform(act: Act, sink: &mut dyn Sink, sent: &mut usize) -> bool {
    let event = match act {
        Act::Say(delta) => {
            *sent += 1;
            Event::Delta(delta)
        }
        Act::Wait(time) => return !closes_within(sink, time),
        Act::Hold => return !closes_within(sink, Duration::from_secs(3600)),
        Act::Finish(reason, completion_tokens) => {
            let usage = Usage { prompt_tokens: PROMPT_TOKENS, completion_tokens };
            Event::Finished { reason, usage, timings: Timings::default() }
        }
        Act::Fail(kind, message) => Event::Failed(Error::new(kind, message)),
    };
    sink.send(event)
}

fn closes_within(sink: &dyn Sink, time: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < time {
        if sink.closed() {
            return true;
        }
        thread::sleep(Duration::from_millis(1));
    }
    false
}

/// A server that runs until it is dropped.
pub(crate) struct Host {
    pub(crate) address: SocketAddr,
    pub(crate) model: Arc<Model>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    pub(crate) fn start(model: Model, adjust: impl FnOnce(&mut Options)) -> Self {
        let mut options = Options::default();
        options.port = 0;
        options.grace = Duration::from_millis(300);
        adjust(&mut options);
        let server = Server::bind(options).unwrap();
        let address = server.address();
        let model = Arc::new(model);
        let served = Arc::clone(&model);
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let stopped = async {
                let _ = stopped.await;
            };
            runtime.block_on(server.run(served, stopped)).unwrap();
        });
        Self { address, model, stop: Some(stop), thread: Some(thread) }
    }

    /// Tells the server to stop, without waiting for it.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits until the server has stopped.
    pub(crate) fn join(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends raw bytes and reads all that comes back.
    pub(crate) fn raw(&self, request: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server that refuses early may close before all is sent.
        let _ = stream.write_all(request);
        Reply::read(stream)
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        self.raw(head(method, path, headers, body).as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Reply {
        self.send("POST", path, &[("content-type", "application/json")], body)
    }

    pub(crate) fn chat(&self, body: &str) -> Reply {
        self.post("/v1/chat/completions", body)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A server with a scripted backend.
pub(crate) struct Stage {
    pub(crate) host: Host,
    script: Arc<Script>,
    ends: mpsc::Receiver<End>,
}

impl Stage {
    pub(crate) fn new(play: Play) -> Self {
        Self::with(play, |_| {})
    }

    pub(crate) fn with(play: Play, adjust: impl FnOnce(&mut Options)) -> Self {
        let (sender, ends) = mpsc::channel();
        let script = Arc::new(Script { play, requests: Mutex::default(), ends: sender });
        let model = Model::loading();
        model.ready(Arc::clone(&script) as Arc<dyn Backend>);
        Self { host: Host::start(model, adjust), script, ends }
    }

    /// The only request that reached the backend.
    pub(crate) fn request(&self) -> Request {
        let mut requests = self.script.requests.lock().unwrap();
        assert_eq!(requests.len(), 1);
        requests.remove(0)
    }

    /// How many requests reached the backend since the last look.
    pub(crate) fn count(&self) -> usize {
        std::mem::take(&mut *self.script.requests.lock().unwrap()).len()
    }

    /// How the next script ends; panics if it goes on for longer than the time.
    pub(crate) fn end_within(&self, time: Duration) -> End {
        self.ends.recv_timeout(time).expect("the script must end in time")
    }
}

/// The bytes of a request on a connection that is closed afterwards.
pub(crate) fn head(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        text += "host: 127.0.0.1\r\n";
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    format!("{text}content-length: {}\r\n\r\n{body}", body.len())
}

/// A whole response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Reply {
    fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        if let Err(error) = stream.read_to_end(&mut bytes) {
            assert!(!bytes.is_empty(), "no response: {error}");
        }
        Self::parse(&bytes)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let split = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = std::str::from_utf8(&bytes[..split]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<_> = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let mut body = bytes[split + 4..].to_vec();
        if headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked") {
            body = dechunk(&body);
        }
        Self { status, headers, body: String::from_utf8(body).unwrap() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// The `error` object; checks its shape.
    pub(crate) fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        let keys: Vec<_> = error.as_object().expect("an error").keys().map(String::as_str).collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(error["message"].is_string() && error["type"].is_string());
        error
    }

    /// The data of each server-sent event.
    pub(crate) fn events(&self) -> Vec<&str> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
    }

    /// The chunks of a stream that ended as it should.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

fn dechunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        bytes = &bytes[end + 2..];
        if length == 0 {
            return body;
        }
        body.extend_from_slice(&bytes[..length.min(bytes.len())]);
        bytes = bytes.get(length + 2..).unwrap_or_default();
    }
    body
}

/// A file beside this crate's tests, or elsewhere in the repository.
pub(crate) fn file(path: &str) -> Vec<u8> {
    std::fs::read(format!("{}/{path}", env!("CARGO_MANIFEST_DIR")))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A file as the data URL of a picture.
pub(crate) fn data_url(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", base64::engine::general_purpose::STANDARD.encode(bytes))
}

/// A minimal chat with further fields, as `"name": value`.
pub(crate) fn chat(fields: &str) -> String {
    let comma = if fields.is_empty() { "" } else { ", " };
    format!(r#"{{"messages": [{{"role": "user", "content": "Hi"}}]{comma}{fields}}}"#)
}
