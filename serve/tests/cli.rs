//! The command itself: exit codes, messages, starting and stopping.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-qwen35moe-Q4_K_M.gguf");
const GEMMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-gemma4-Q4_K_M.gguf");
const PROJECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-gemma4-mmproj-bf16.gguf");
const RED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/vision/00-solid-red.png");
const BLUE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/vision/02-solid-blue.png");

fn skep(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(args).env_remove("SKEP_LOG").env_remove("SKEP_API_KEY");
    command
}

fn output(args: &[&str]) -> Output {
    skep(args).stdin(Stdio::null()).output().unwrap()
}

/// The one line on stderr of a command that fails, with its exit code.
fn failure(args: &[&str]) -> (i32, String) {
    let output = output(args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(output.stdout.is_empty());
    let line = text.trim_end().strip_prefix("skep: error: ").unwrap_or_else(|| panic!("{text}"));
    (output.status.code().unwrap(), line.to_owned())
}

#[test]
fn version_and_help() {
    let version = output(&["--version"]);
    assert!(version.status.success());
    assert_eq!(String::from_utf8(version.stdout).unwrap(), concat!("skep ", env!("CARGO_PKG_VERSION"), "\n"));
    for args in [&["--help"][..], &["help"], &["serve", "--help"], &["run", "--help"]] {
        let help = output(args);
        assert!(help.status.success() && help.stderr.is_empty());
        assert!(String::from_utf8(help.stdout).unwrap().contains("Usage: skep"));
    }
}

#[test]
fn wrong_use_is_one_line_and_code_2() {
    let cases: [(&[&str], &str); 13] = [
        (&[], "no command"),
        (&["fly"], "'fly'"),
        (&["serve"], "--model"),
        (&["serve", "-m", MODEL, "--bogus"], "'--bogus'"),
        (&["serve", "-m", MODEL, "--port", "65536"], "65536"),
        (&["serve", "-m", MODEL, "--parallel", "0"], "--parallel"),
        (&["serve", "-m", MODEL, "--cors-origin", "*"], "`*`"),
        (&["serve", "-m", GEMMA, "--image-tokens", "1024"], "70, 140, 280, 560, 1120"),
        (&["serve", "-m", GEMMA, "--image-tokens", "50"], "70, 140, 280, 560, 1120"),
        (&["serve", "-m", GEMMA, "--image-tokens", "many"], "70, 140, 280, 560, 1120"),
        (&["run", "-m", GEMMA, "--mmproj", PROJECTOR, "--no-mmproj", "Hi"], "--no-mmproj"),
        (&["run", "-m", MODEL, "--temp", "hot", "Hi"], "hot"),
        (&["run", "-m", MODEL, "--temp", "9", "Hi"], "temperature"),
    ];
    for (args, named) in cases {
        let (code, line) = failure(args);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(named), "{line}");
    }
    let output = skep(&["run", "-m", MODEL, "Hi"]).env("SKEP_LOG", "skep=loud").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("skep: error: SKEP_LOG"));
}

#[test]
fn other_failures_are_one_line_and_code_1() {
    for command in ["serve", "run"] {
        for path in ["no/such\nmodel.gguf", "nothing"] {
            let (code, line) = failure(&[command, "-m", path]);
            assert_eq!(code, 1);
            let directory = std::env::current_dir().unwrap();
            assert!(line.starts_with(&format!("file not found: {}", directory.display())), "{line}");
        }
        // A card that is there would serve.
        let card = skep_hal::gpu::cuda::list().is_ok();
        for device in ["cuda", "hip"].into_iter().filter(|&device| device != "cuda" || !card) {
            let (code, line) = failure(&[command, "-m", MODEL, "--device", device]);
            assert_eq!(code, 1);
            assert!(line.contains(device), "{line}");
        }
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let (code, line) = failure(&[command, "-m", manifest]);
        assert_eq!(code, 1);
        assert!(line.contains("GGUF"), "{line}");
    }
}

#[test]
fn a_port_in_use_is_noticed_before_the_model_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, line) = failure(&["serve", "-m", MODEL, "--port", &port]);
    assert_eq!(code, 1);
    assert!(line.contains(&format!("port {port}")) && line.contains("in use"), "{line}");
}

#[test]
fn run_answers_one_prompt() {
    let output = output(&["run", "-m", MODEL, "--temp", "0", "What is 3 times 6?"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "3 times 6 is 18.\n");
    assert!(String::from_utf8(output.stderr).unwrap().contains("I multiply 3 by 6 and get 18."));
}

#[test]
fn run_looks_at_pictures() {
    let ask = |args: &[&str]| {
        let output = output(&[&["run", "-m", GEMMA, "--temp", "0"], args].concat());
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let question = "What colour is this image?";
    assert_eq!(ask(&["--image", RED, question]), "The image is red.\n", "by the projector beside the model");
    assert_eq!(ask(&["--mmproj", PROJECTOR, "--image", BLUE, question]), "The image is blue.\n");
    assert_eq!(ask(&["--no-mmproj", "Sort these numbers: 41, 90, 68"]), "41, 68, 90.\n");
}

#[test]
fn a_chat_keeps_its_picture() {
    let mut child = skep(&["run", "-m", GEMMA, "--temp", "0", "--image", RED])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let question = "What colour is this image?\n";
    child.stdin.take().unwrap().write_all([question, question].concat().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "The image is red.\nThe image is red.\n");
}

#[test]
fn files_that_do_not_go_together_are_told_apart() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (args, named) in [
        (&["-m", PROJECTOR, "Hi"][..], "this is a projector"),
        (&["-m", PROJECTOR, "--mmproj", GEMMA, "Hi"], "this is a projector"),
        (&["-m", GEMMA, "--mmproj", GEMMA, "Hi"], "not a projector"),
        (&["-m", MODEL, "--mmproj", PROJECTOR, "Hi"], "no projector"),
        (&["-m", GEMMA, "--mmproj", manifest, "Hi"], "GGUF"),
        (&["-m", GEMMA, "--mmproj", "nowhere.gguf", "Hi"], "file not found"),
        (&["-m", MODEL, "--image", RED, "Hi"], "--mmproj"),
        (&["-m", GEMMA, "--no-mmproj", "--image", RED, "Hi"], "--mmproj"),
        (&["-m", GEMMA, "--image", "nowhere.png", "Hi"], "nowhere.png"),
        (&["-m", GEMMA, "--image", manifest, "Hi"], "Cargo.toml"),
    ] {
        let (code, line) = failure(&[&["run"], args].concat());
        assert_eq!(code, 1, "{line}");
        assert!(line.contains(named), "{args:?}: {line}");
    }
}

#[test]
fn a_broken_projector_nobody_asked_for_is_passed_over() {
    let folder = std::env::temp_dir().join(format!("skep-cli-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let model = folder.join("model.gguf");
    std::fs::copy(GEMMA, &model).unwrap();
    let broken = std::fs::read(PROJECTOR).unwrap();
    std::fs::write(folder.join("mmproj-model.gguf"), &broken[..broken.len() / 2]).unwrap();
    let model = model.to_str().unwrap();
    let output = output(&["run", "-m", model, "--temp", "0", "Sort these numbers: 41, 90, 68"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "41, 68, 90.\n");
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("images are not taken") && log.contains("mmproj-model.gguf"), "{log}");
    let (code, line) =
        failure(&["run", "-m", model, "--mmproj", folder.join("mmproj-model.gguf").to_str().unwrap(), "Hi"]);
    assert_eq!(code, 1, "what was asked for must work: {line}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn inspect_knows_models_and_projectors() {
    let text = |args: &[&str]| {
        let output = output(&[&["inspect"], args].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let projector = text(&[PROJECTOR]);
    assert!(
        projector.contains("gemma4v: 4 blocks of width 128") && projector.contains("v.blk.*.ln1"),
        "{projector}"
    );
    assert!(!projector.contains("not runnable"), "{projector}");
    assert!(text(&[GEMMA]).contains("12: 10 sliding attention, 2 full attention [5, 11]"));
    let json: serde_json::Value = serde_json::from_str(&text(&[PROJECTOR, "--json"])).unwrap();
    assert_eq!((&json["projector"]["projection"], &json["model"]), (&256.into(), &serde_json::Value::Null));
}

#[test]
fn logits_of_a_prompt_with_a_picture() {
    let folder = std::env::temp_dir().join(format!("skep-logits-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (begin, soft, end) = (17, 18, 19);
    let prompt = |places: usize| [vec![2, 15, begin], vec![soft; places], vec![end, 300, 301]].concat();
    std::fs::write(
        path("ids.json"),
        serde_json::json!({"prompt_ids": prompt(70), "decode_ids": [302]}).to_string(),
    )
    .unwrap();
    let common = ["logits", "-m", GEMMA, "--image-tokens", "70", "--ids"];
    let run = |image: &str, chunk: &str, out: &str| {
        let args = [&path("ids.json"), "--out", &path(out), "--image", image, "--chunk", chunk];
        let output = output(&[&common[..], &args].concat());
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        std::fs::read(path(out)).unwrap()
    };
    let whole = run(RED, "512", "a.npy");
    assert!(String::from_utf8_lossy(&whole[..128]).contains("'shape': (77, 2048)"));
    assert_eq!(whole, run(RED, "7", "b.npy"), "chunks do not count");
    let yellow = RED.replace("00-solid-red", "03-solid-yellow");
    assert_ne!(whole, run(&yellow, "512", "c.npy"), "the picture does");

    std::fs::write(path("ids.json"), serde_json::json!({"prompt_ids": prompt(69)}).to_string()).unwrap();
    let (ids, out) = (path("ids.json"), path("d.npy"));
    let args = [&common[..], &[&ids, "--out", &out, "--image", RED]].concat();
    let (code, line) = failure(&args);
    assert!(code == 2 && line.contains("69") && line.contains("70"), "{line}");
    let (code, line) = failure(&[&args[..], &["--image", RED]].concat());
    assert!(code == 2 && line.contains("places for 1"), "{line}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn run_chats_until_the_input_ends() {
    let mut child = skep(&["run", "-m", MODEL, "--temp", "0", "--no-think"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"I have a horse.\n\nWhich pet do I have?").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "A horse is a fine pet.\nYou have a horse.\n");
    assert!(output.stderr.is_empty(), "{:?}", String::from_utf8(output.stderr));
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_and_not_the_chat() {
    let mut child = skep(&["run", "-m", MODEL, "--temp", "0", "--no-think", "--ctx", "8192"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut answer = || lines.next().unwrap().unwrap();
    input.write_all(b"I have a horse.\n").unwrap();
    assert_eq!(answer(), "A horse is a fine pet.");
    // Takes seconds to read, so it is still being read when the signal comes.
    input.write_all(format!("{}\n", "The turtle slept. ".repeat(1500)).as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    let start = Instant::now();
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(answer(), "");
    let stopped = start.elapsed();
    input.write_all(b"Which pet do I have?\n").unwrap();
    assert_eq!(answer(), "You have a horse.", "the stopped turn is forgotten");
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!(stopped < Duration::from_secs(5), "{stopped:?}");
}

/// A served model, ended by the test or when it is dropped.
struct Served {
    child: Child,
    address: String,
    curl: String,
    stderr: ChildStderr,
}

impl Served {
    fn start(args: &[&str], key: Option<&str>) -> Self {
        let mut command = skep(&["serve", "-m", MODEL, "--port", "0", "--ctx", "2048"]);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(key) = key {
            command.env("SKEP_API_KEY", key);
        }
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().expect("a first line").unwrap();
        let address = line.strip_prefix("listening on http://").expect("an address").to_owned();
        let curl = lines.next().expect("a second line").unwrap();
        let stderr = child.stderr.take().unwrap();
        Self { child, address, curl, stderr }
    }

    fn ask(&self, headers: &str, body: &str) -> String {
        let mut stream = self.open(headers, body);
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    fn open(&self, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        write!(stream, "{head}{headers}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    #[cfg(unix)]
    fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the end and gives the exit code and what was logged.
    fn end(mut self, limit: Duration) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < limit, "the server must end");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut log = String::new();
        self.stderr.read_to_string(&mut log).unwrap();
        (status.code(), log)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Fails when it has ended, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const QUESTION: &str =
    r#"{"messages": [{"role": "user", "content": "What is 3 times 6?"}], "temperature": 0}"#;
const ENDLESS: &str =
    r#"{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "ignore_eos": true}"#;

#[cfg(unix)]
#[test]
fn serve_answers_logs_and_stops() {
    let served = Served::start(&[], None);
    assert!(served.curl.contains(&served.address) && served.curl.starts_with("curl "), "{}", served.curl);
    let reply = served.ask("", QUESTION);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(reply.contains("3 times 6 is 18."), "{reply}");
    served.signal("TERM");
    let (code, log) = served.end(Duration::from_secs(10));
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("POST /v1/chat/completions 200"), "{log}");
    assert!(!log.contains("times") && !log.contains("multiply"), "no content in the log: {log}");
}

#[cfg(unix)]
#[test]
fn serve_keeps_its_key_to_itself() {
    let served = Served::start(&[], Some("sk-Geheim"));
    assert!(served.curl.contains("$SKEP_API_KEY") && !served.curl.contains("Geheim"));
    assert!(served.ask("", QUESTION).starts_with("HTTP/1.1 401"));
    assert!(served.ask("authorization: Bearer sk-Geheim\r\n", QUESTION).starts_with("HTTP/1.1 200"));
    served.signal("INT");
    let (code, log) = served.end(Duration::from_secs(10));
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("Geheim"));
}

#[cfg(unix)]
#[test]
fn serve_ends_running_answers_when_it_stops() {
    let served = Served::start(&[], None);
    let mut stream = served.open("", ENDLESS);
    let mut seen = [0; 64];
    stream.read_exact(&mut seen).unwrap();
    served.signal("TERM");
    let (code, log) = served.end(Duration::from_secs(10));
    assert_eq!(code, Some(0), "{log}");
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_at_once() {
    let served = Served::start(&[], None);
    let mut stream = served.open("", ENDLESS);
    let mut seen = [0; 64];
    stream.read_exact(&mut seen).unwrap();
    served.signal("TERM");
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    served.signal("TERM");
    let (code, _) = served.end(Duration::from_secs(2));
    assert_eq!(code, Some(130));
    assert!(start.elapsed() < Duration::from_millis(1500));
}
