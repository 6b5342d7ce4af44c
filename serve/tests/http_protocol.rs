//! Routes, errors, keys, hosts and origins: what holds for every request.

mod common;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use common::{Host, Play, Stage, chat, head};
use serde_json::{Value, json};
use skep_engine::ErrorKind;
use skep_serve::{Model, Options, Server};

#[test]
fn unknown_routes_and_wrong_methods() {
    let stage = Stage::new(Play::hello());
    for path in ["/", "/v1", "/v1/chat/completions/", "/v1/embeddings", "/v1/models/", "/%00"] {
        let reply = stage.host.get(path);
        assert_eq!(reply.status, 404, "{path}");
        assert_eq!(reply.error()["type"], "invalid_request_error");
    }
    let reply = stage.host.get("/v1/chat/completions");
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert!(reply.error()["message"].as_str().unwrap().contains("GET"));
    let reply = stage.host.post("/v1/models", "{}");
    assert_eq!((reply.status, reply.header("allow")), (405, Some("GET,HEAD")));
    assert_eq!(stage.count(), 0);
}

#[test]
fn models_and_health() {
    let stage = Stage::new(Play::hello());
    let list = stage.host.get("/v1/models").json();
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!(model["id"], "org/scripted model");
    assert_eq!(model["object"], "model");
    assert_eq!(model["context_length"], 4096);
    assert!(model["created"].as_u64().unwrap() > 1_700_000_000);

    assert_eq!(stage.host.get("/v1/models/org/scripted%20model").json(), *model);
    let reply = stage.host.get("/v1/models/gpt-4");
    assert_eq!((reply.status, &reply.error()["code"]), (404, &json!("model_not_found")));
    let reply = stage.host.get("/health");
    assert_eq!((reply.status, reply.json()), (200, json!({"status": "ok"})));
}

#[test]
fn while_loading_health_tells_progress_and_requests_are_told_to_retry() {
    let host = Host::start(Model::loading(), |_| {});
    let reply = host.get("/health");
    assert_eq!((reply.status, reply.json()), (503, json!({"status": "loading", "progress": 0.0})));
    host.model.progress(1, 4);
    assert_eq!(host.get("/health").json()["progress"], 0.25);
    for reply in [host.chat(&chat("")), host.get("/v1/models")] {
        assert_eq!((reply.status, reply.header("retry-after")), (503, Some("2")));
        assert_eq!(reply.error()["code"], "loading");
        assert!(reply.error()["message"].as_str().unwrap().contains("25 %"));
    }
}

#[test]
fn bodies_that_are_no_request() {
    let stage = Stage::new(Play::hello());
    let deep = format!(r#"{{"messages": {}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    let bodies = [
        "",
        "{",
        "null",
        "[]",
        "\"text\"",
        "{\"messages\": [}",
        "{} {}",
        "{\"temperature\": NaN}",
        "{\"a\": 1e400}",
        "\u{feff}{}",
        &deep,
    ];
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for body in bodies {
            let reply = stage.host.post(path, body);
            assert_eq!(reply.status, 400, "{path} {body:.40}");
            assert_eq!(reply.error()["type"], "invalid_request_error");
        }
    }
    let mut request =
        head("POST", "/v1/chat/completions", &[], "").replace("length: 0", "length: 4").into_bytes();
    request.extend_from_slice(b"{\"\xff\xfe");
    assert_eq!(stage.host.raw(&request).status, 400);
    assert_eq!(stage.count(), 0);
    assert_eq!(stage.host.chat(&chat("")).status, 200, "the server goes on");
}

#[test]
fn any_content_type_is_read_as_json() {
    let stage = Stage::new(Play::hello());
    for headers in
        [&[][..], &[("content-type", "text/plain")], &[("content-type", "application/json; charset=utf-8")]]
    {
        assert_eq!(stage.host.send("POST", "/v1/chat/completions", headers, &chat("")).status, 200);
    }
}

#[test]
fn bodies_over_the_limit() {
    let stage = Stage::with(Play::hello(), |options| options.body_limit = 1000);
    let body = chat(&format!(r#""user": "{}""#, "x".repeat(1000)));
    let reply = stage.host.chat(&body);
    assert_eq!(reply.status, 413);
    assert!(reply.error()["message"].as_str().unwrap().contains("1000 bytes"));

    let announce = |length: &str| {
        let request =
            head("POST", "/v1/chat/completions", &[], "").replace("length: 0", &format!("length: {length}"));
        stage.host.raw(request.as_bytes()).status
    };
    assert_eq!(announce("1000000000000"), 413);
    assert!([400, 431].contains(&announce("18446744073709551615")));
    assert_eq!(announce("-1"), 400);

    let chunked = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                   transfer-encoding: chunked\r\n\r\n";
    let request = format!("{chunked}{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    assert_eq!(stage.host.raw(request.as_bytes()).status, 413);
    let body = chat("");
    let request = format!("{chunked}{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    assert_eq!(stage.host.raw(request.as_bytes()).status, 200);
}

#[test]
fn bodies_that_never_arrive() {
    let stage = Stage::with(Play::hello(), |options| options.body_timeout = Duration::from_millis(100));
    let request = head("POST", "/v1/chat/completions", &[], "{").replace("length: 1", "length: 2");
    let reply = stage.host.raw(request.as_bytes());
    assert_eq!(reply.status, 408);
    reply.error();
}

#[test]
fn bytes_that_are_no_http() {
    let stage = Stage::new(Play::hello());
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nx\r\n\r\n",
    ] {
        assert_eq!(stage.host.raw(bytes).status, 400);
    }
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000));
    assert!([404, 414].contains(&stage.host.raw(long.as_bytes()).status));
    assert_eq!(stage.host.chat(&chat("")).status, 200, "the server goes on");
}

#[test]
fn one_connection_takes_many_requests() {
    use std::io::Read;
    let stage = Stage::new(Play::hello());
    let mut stream = stage.host.connect();
    for _ in 0..3 {
        let request =
            head("POST", "/v1/chat/completions", &[], &chat("")).replace("connection: close\r\n", "");
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"}}}") {
            let mut buffer = [0; 1024];
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0);
            bytes.extend_from_slice(&buffer[..n]);
        }
        assert!(bytes.starts_with(b"HTTP/1.1 200"));
    }
}

#[test]
fn keys() {
    let stage = Stage::with(Play::hello(), |options| options.api_key = Some("sk-Geheim".into()));
    let wrong = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk-geheim",
        "Bearer sk-Geheim1",
        "Bearer sk-Gehei",
        "Basic sk-Geheim",
        "sk-Geheim",
    ];
    for header in wrong {
        let headers = [("authorization", header)];
        for reply in [
            stage.host.send("GET", "/v1/models", &headers, ""),
            stage.host.send("POST", "/v1/chat/completions", &headers, &chat("")),
            stage.host.send("GET", "/nothing", &headers, ""),
        ] {
            assert_eq!(reply.status, 401, "{header:?}");
            assert_eq!(reply.error()["code"], "invalid_api_key");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
            assert!(!reply.body.contains("Geheim"));
        }
    }
    assert_eq!(stage.host.get("/v1/models").status, 401);
    assert_eq!(stage.count(), 0);
    for header in ["Bearer sk-Geheim", "bearer sk-Geheim"] {
        assert_eq!(stage.host.send("GET", "/v1/models", &[("authorization", header)], "").status, 200);
    }
    assert_eq!(stage.host.get("/health").status, 200);
}

#[test]
fn a_foreign_host_is_turned_away_on_loopback() {
    let stage = Stage::with(Play::hello(), |options| options.allowed_hosts = vec!["my.box".into()]);
    for host in ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "192.168.1.2"] {
        let reply = stage.host.send("POST", "/v1/chat/completions", &[("host", host)], &chat(""));
        assert_eq!(reply.status, 403, "{host}");
        assert_eq!(reply.error()["type"], "permission_error");
        assert_eq!(stage.host.send("GET", "/health", &[("host", host)], "").status, 403);
    }
    assert_eq!(stage.count(), 0);
    for host in ["localhost", "localhost:1234", "127.0.0.1:80", "[::1]:80", "My.Box:8080"] {
        assert_eq!(stage.host.send("GET", "/v1/models", &[("host", host)], "").status, 200, "{host}");
    }
    assert_eq!(stage.host.raw(b"GET /v1/models HTTP/1.0\r\n\r\n").status, 200);
}

#[test]
fn a_foreign_origin_is_turned_away() {
    let stage =
        Stage::with(Play::hello(), |options| options.cors_origins = vec!["https://chat.example".into()]);
    let post = |origin| {
        let headers = [("origin", origin), ("host", "localhost:8080"), ("content-type", "text/plain")];
        stage.host.send("POST", "/v1/chat/completions", &headers, &chat(""))
    };
    for origin in ["https://evil.example", "https://chat.example.evil.example", "http://chat.example", "null"]
    {
        assert_eq!(post(origin).status, 403, "{origin}");
    }
    assert_eq!(stage.count(), 0);
    let reply = post("https://chat.example");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://chat.example"));
    let reply = post("http://localhost:8080");
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, None));
}

#[test]
fn preflight() {
    let with_key = |options: &mut Options| {
        options.cors_origins = vec!["https://chat.example".into()];
        options.api_key = Some("key".into());
    };
    let stage = Stage::with(Play::hello(), with_key);
    let ask = |origin| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type,x-stainless-os"),
        ];
        stage.host.send("OPTIONS", "/v1/chat/completions", &headers, "")
    };
    let reply = ask("https://chat.example");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://chat.example"));
    assert_eq!(
        reply.header("access-control-allow-headers"),
        Some("authorization,content-type,x-stainless-os")
    );
    assert!(reply.header("access-control-allow-methods").unwrap().contains("POST"));
    assert_eq!(ask("https://evil.example").status, 403);
    // A page may read why it was refused.
    let reply = stage.host.send("GET", "/v1/models", &[("origin", "https://chat.example")], "");
    assert_eq!(
        (reply.status, reply.header("access-control-allow-origin")),
        (401, Some("https://chat.example"))
    );
}

#[test]
fn errors_of_the_engine_get_their_status() {
    let limit = ErrorKind::ContextLength { prompt: 5000, limit: 4096 };
    let cases = [
        (ErrorKind::Request, 400, "invalid_request_error", Value::Null, None),
        (ErrorKind::Template, 400, "invalid_request_error", Value::Null, None),
        (limit, 400, "invalid_request_error", json!("context_length_exceeded"), None),
        (ErrorKind::Busy, 503, "server_error", json!("busy"), Some("1")),
        (ErrorKind::Cancelled, 503, "server_error", json!("cancelled"), None),
        (ErrorKind::NotFinite, 500, "server_error", Value::Null, None),
        (ErrorKind::Model, 500, "server_error", Value::Null, None),
    ];
    for (kind, status, r#type, code, retry) in cases {
        for fields in ["", r#""stream": true"#] {
            let stage = Stage::new(Play::refuse(kind, "the reason"));
            let reply = stage.host.chat(&chat(fields));
            assert_eq!((reply.status, reply.header("retry-after")), (status, retry), "{kind:?}");
            let error = reply.error();
            assert_eq!(error["message"], "the reason");
            assert_eq!((&error["type"], &error["code"]), (&json!(r#type), &code));
        }
    }
}

#[test]
fn options_that_cannot_be_used() {
    let bad = |adjust: fn(&mut Options)| {
        let mut options = Options::default();
        options.port = 0;
        adjust(&mut options);
        Server::bind(options).err().expect("an error").kind()
    };
    use std::io::ErrorKind::{AddrInUse, InvalidInput};
    assert_eq!(bad(|options| options.cors_origins = vec!["*".into()]), InvalidInput);
    assert_eq!(bad(|options| options.cors_origins = vec!["https://a.example/path".into()]), InvalidInput);
    assert_eq!(bad(|options| options.cors_origins = vec!["chat.example".into()]), InvalidInput);
    assert_eq!(bad(|options| options.api_key = Some(String::new())), InvalidInput);
    assert_eq!(bad(|options| options.api_key = Some("a\nb".into())), InvalidInput);

    let first = Host::start(Model::loading(), |_| {});
    let mut options = Options::default();
    options.port = first.address.port();
    assert_eq!(Server::bind(options).err().expect("an error").kind(), AddrInUse);
}

#[test]
fn connections_over_the_limit_wait() {
    let stage = Stage::with(Play::hello(), |options| options.connections = 1);
    let host = Arc::new(stage.host);
    let idle = host.connect();
    std::thread::sleep(Duration::from_millis(50));
    let waiting = {
        let host = Arc::clone(&host);
        std::thread::spawn(move || host.get("/health").status)
    };
    std::thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished());
    drop(idle);
    assert_eq!(waiting.join().unwrap(), 200);
}
