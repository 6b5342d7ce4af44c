//! Pictures in requests, as far as the server reads them: what reaches the backend, and what is refused.
//!
//! The files in `pictures/` were made with Pillow 13; `bomb.png`, `empty.png`, `no-rows.png`, `line.png` and `long.png`
//! by hand, with correct checksums.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use common::{Play, Reply, Stage, data_url, file};
use serde_json::{Value, json};
use skep_engine::chat::{Content, Image, Message, Part};
use skep_engine::{Budget, Prompt};
use skep_serve::Options;

/// A server whose model takes images.
fn seeing(adjust: impl FnOnce(&mut Options)) -> Stage {
    Stage::with(Play { images: Some(Budget::default()), ..Play::hello() }, adjust)
}

fn ask(stage: &Stage, content: &Value) -> Reply {
    stage.host.chat(&json!({"messages": [{"role": "user", "content": content}]}).to_string())
}

fn part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn messages(stage: &Stage) -> Vec<Message> {
    match stage.request().prompt {
        Prompt::Chat { messages, .. } => messages,
        other => panic!("{other:?}"),
    }
}

/// The one image of the one request.
fn image(stage: &Stage) -> Image {
    let messages = messages(stage);
    let images: Vec<_> = messages.iter().flat_map(|message| message.content.images()).collect();
    assert_eq!(images.len(), 1);
    images[0].clone()
}

/// The colour of a picture that has but one, and its size.
fn solid(image: &Image) -> ([u8; 3], usize, usize) {
    let picture = &image.picture;
    let middle = picture.rgb().len() / 2 / 3 * 3;
    (picture.rgb()[middle..][..3].try_into().unwrap(), picture.width(), picture.height())
}

/// A refusal that names the part, and nothing reached the backend.
fn refused(stage: &Stage, content: &Value) -> String {
    let reply = ask(stage, content);
    assert_eq!(reply.status, 400, "{}", reply.body);
    let error = reply.error();
    assert_eq!(error["type"], "invalid_request_error");
    let at = content.as_array().unwrap().len() - 1;
    assert_eq!(error["param"], format!("messages[0].content[{at}]"), "{error}");
    assert_eq!(stage.count(), 0);
    let message = error["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&format!("messages[0].content[{at}]")), "{message}");
    message
}

#[test]
fn all_forms_of_a_part_are_read() {
    let stage = seeing(|_| {});
    let bytes = file("tests/pictures/blue-rgba.png");
    let url = data_url(&bytes);
    let base64 = STANDARD.encode(&bytes);
    let lines: Vec<_> = base64.as_bytes().chunks(76).map(|line| str::from_utf8(line).unwrap()).collect();
    let parts = [
        part(&url),
        json!({"type": "image_url", "image_url": url}),
        json!({"type": "input_image", "image_url": url}),
        json!({"type": "input_image", "image_url": {"url": url}, "file_id": null}),
        part(&base64),
        part(&format!("data:image/png;base64,{}", lines.join("\r\n"))),
        part(&format!("data:image/png;base64,{}", URL_SAFE_NO_PAD.encode(&bytes))),
        // The label is not believed.
        part(&format!("data:image/jpeg;base64,{base64}")),
        part(&format!("data:text/plain;charset=utf-8;base64,{base64}")),
    ];
    for part in parts {
        let reply = ask(&stage, &json!([part]));
        assert_eq!(reply.status, 200, "{part}: {}", reply.body);
        assert_eq!(solid(&image(&stage)), ([40, 60, 220], 96, 96));
    }
}

#[test]
fn formats_are_told_by_content() {
    let stage = seeing(|_| {});
    let (red, green, blue, yellow) = ([220, 30, 30], [30, 170, 50], [40, 60, 220], [235, 220, 40]);
    for (name, colour) in [
        ("red-cmyk.jpg", red),
        ("red-palette.png", red),
        ("green-icc.jpg", green),
        ("blue-rgba.png", blue),
        ("blue-then-red.gif", blue),
        ("yellow.webp", yellow),
        ("yellow-lossy.webp", yellow),
    ] {
        let reply = ask(&stage, &json!([part(&data_url(&file(&format!("tests/pictures/{name}"))))]));
        assert_eq!(reply.status, 200, "{name}: {}", reply.body);
        let (found, width, height) = solid(&image(&stage));
        assert_eq!((width, height), (96, 96), "{name}");
        assert!(found.iter().zip(colour).all(|(a, b)| a.abs_diff(b) <= 6), "{name}: {found:?}");
    }
}

#[test]
fn order_and_budgets_are_kept() {
    let stage = seeing(|_| {});
    let url = |name: &str| data_url(&file(&format!("../models/vision/{name}")));
    let body = json!({"messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "one"},
            {"type": "image_url", "image_url": {"url": url("00-solid-red.png"), "detail": "low"}},
            {"type": "text", "text": "two"},
            {"type": "image_url", "image_url": {"url": url("02-solid-blue.png"), "detail": "high"}},
            {"type": "image_url", "image_url": {"url": url("02-solid-blue.png"), "detail": "auto"}},
        ]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": [
            {"type": "input_image", "image_url": url("03-solid-yellow.png"), "detail": "low", "max_soft_tokens": 560},
            {"type": "image_url", "image_url": {"url": url("03-solid-yellow.png"), "max_soft_tokens": 140}},
            {"type": "image_url", "image_url": {"url": url("03-solid-yellow.png"), "detail": null}, "max_soft_tokens": null},
            {"type": "text", "text": "four"},
        ]},
    ]});
    let reply = stage.host.chat(&body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.body);
    let messages = messages(&stage);
    let read: Vec<Vec<_>> = messages
        .iter()
        .map(|message| match &message.content {
            Content::Text(text) => vec![text.clone()],
            Content::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    Part::Text(text) => text.clone(),
                    Part::Image(image) => {
                        format!("{:?} {:?}", solid(image).0, image.budget.map(Budget::tokens))
                    }
                    other => panic!("{other:?}"),
                })
                .collect(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        read,
        [
            vec!["one", "[220, 30, 30] Some(70)", "two", "[40, 60, 220] Some(1120)", "[40, 60, 220] None"],
            vec!["three"],
            vec!["[235, 220, 40] Some(560)", "[235, 220, 40] Some(140)", "[235, 220, 40] None", "four"],
        ]
    );
}

#[test]
fn malformed_parts_name_themselves() {
    let stage = seeing(|_| {});
    let url = data_url(&file("tests/pictures/blue-rgba.png"));
    let text = json!({"type": "text", "text": "What is this?"});
    for (part, clause) in [
        (json!({"type": "image_url"}), "no `image_url`"),
        (json!({"type": "image_url", "image_url": null}), "no `image_url`"),
        (json!({"type": "image_url", "image_url": 5}), "no `image_url`"),
        (json!({"type": "image_url", "image_url": {}}), "no `url`"),
        (json!({"type": "image_url", "image_url": {"url": 5}}), "no `url`"),
        (json!({"type": "input_image", "file_id": "file-1"}), "data URL"),
        (
            json!({"type": "image_url", "image_url": {"url": url, "detail": "utmost"}}),
            "`low`, `high` or `auto`",
        ),
        (json!({"type": "image_url", "image_url": {"url": url, "detail": 1}}), "`low`, `high` or `auto`"),
        (
            json!({"type": "image_url", "image_url": {"url": url, "max_soft_tokens": 1024}}),
            "70, 140, 280, 560, 1120",
        ),
        (json!({"type": "image_url", "image_url": {"url": url, "max_soft_tokens": "280"}}), "70, 140, 280"),
        (json!({"type": "image_url", "image_url": {"url": url, "max_soft_tokens": -1}}), "70, 140, 280"),
        (part(""), "without data"),
        (part("data:image/png;base64,"), "without data"),
        (part("data:image/png,abc"), "not in base64"),
        (part("data:image/png;base64,?"), "not valid base64"),
        (part("data:image/png;base64,aGVsbG8="), ""),
        (part(&data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>")), ""),
        (part(&data_url(b"BM6\x00\x00\x00\x00\x00\x00\x00")), ""),
        (part("file:///etc/passwd"), "never fetched"),
        (part("ftp://example.com/a.png"), "never fetched"),
        (part("http://127.0.0.1:1/"), "does not fetch: send a data URL"),
        (part("https://example.com/a.png"), "does not fetch: send a data URL"),
    ] {
        let message = refused(&stage, &json!([text, part]));
        assert!(message.contains(clause), "{part}: {message}");
    }
    assert_eq!(ask(&stage, &json!([text, part(&url)])).status, 200, "the next request is answered");
}

#[test]
fn hostile_pictures_are_refused_and_the_next_is_read() {
    let stage = seeing(|_| {});
    let whole = file("../models/vision/10-shape.png");
    let jpeg = file("tests/pictures/green-icc.jpg");
    let webp = file("tests/pictures/yellow-lossy.webp");
    let gif = file("tests/pictures/blue-then-red.gif");
    let mut hostile: Vec<(String, Vec<u8>)> = ["bomb.png", "empty.png", "no-rows.png", "line.png"]
        .map(|name| (name.to_owned(), file(&format!("tests/pictures/{name}"))))
        .into();
    for (name, bytes) in [("png", &whole), ("jpeg", &jpeg), ("webp", &webp), ("gif", &gif)] {
        for length in [1, 8, 20, bytes.len() / 2] {
            hostile.push((format!("{name} cut to {length}"), bytes[..length].to_vec()));
        }
    }
    hostile.push((
        "a picture of another kind by its first bytes".into(),
        [&b"\xff\xd8\xff"[..], &whole].concat(),
    ));
    for (name, bytes) in hostile {
        let start = Instant::now();
        let message = refused(&stage, &json!([part(&data_url(&bytes))]));
        assert!(!message.contains('\n'), "{name}: {message}");
        assert!(start.elapsed() < Duration::from_secs(10), "{name}");
        assert_eq!(ask(&stage, &json!([part(&data_url(&whole))])).status, 200, "after {name}");
        assert_eq!(stage.count(), 1);
    }
    assert_eq!(ask(&stage, &json!([part(&data_url(&file("tests/pictures/long.png")))])).status, 200);
    assert_eq!(solid(&image(&stage)), ([220, 30, 30], 1, 2000));
}

#[test]
fn limits_are_kept() {
    let bytes = file("tests/pictures/blue-rgba.png");
    let url = data_url(&bytes);

    let stage = seeing(|options| options.images.count = 3);
    assert_eq!(ask(&stage, &json!(vec![part(&url); 3])).status, 200);
    assert_eq!(stage.count(), 1);
    assert!(refused(&stage, &json!(vec![part(&url); 4])).contains("may hold 3"));

    let stage = seeing(|options| options.images.bytes = bytes.len());
    assert_eq!(ask(&stage, &json!([part(&url)])).status, 200);
    assert_eq!(stage.count(), 1);
    let longer = data_url(&[&bytes[..], &[0]].concat());
    assert!(refused(&stage, &json!([part(&longer)])).contains(&format!("more than {} bytes", bytes.len())));

    let stage = seeing(|options| options.images.pixels = 96 * 96);
    assert_eq!(ask(&stage, &json!([part(&url)])).status, 200);
    assert_eq!(stage.count(), 1);
    let larger = data_url(&file("../models/vision/10-shape.png"));
    assert!(refused(&stage, &json!([part(&larger)])).contains("384x384"));

    // Three pictures have room beside the body, a fourth never will.
    let stage = seeing(|options| options.memory = 3 * 96 * 96 * 3 + 10_000);
    assert_eq!(ask(&stage, &json!(vec![part(&url); 3])).status, 200);
    assert_eq!(stage.count(), 1);
    assert!(refused(&stage, &json!(vec![part(&url); 4])).contains("too many pixels"));

    let stage = seeing(|_| {});
    let many = json!(vec![part("data:image/png;base64,"); 100]);
    assert_eq!(ask(&stage, &many).status, 400);
    assert_eq!(stage.count(), 0);
}

#[test]
fn bodies_may_be_larger_where_pictures_are_taken() {
    let limit = |options: &mut Options| {
        options.body_limit = 10_000;
        options.images.body_limit = 20_000;
    };
    let padded = |bytes: usize| {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "padding": ""}).to_string();
        body.replace(r#""padding":"""#, &format!(r#""padding":"{}""#, "x".repeat(bytes - body.len())))
    };
    for (stage, limit) in [(Stage::with(Play::hello(), limit), 10_000), (seeing(limit), 20_000)] {
        assert_eq!(stage.host.chat(&padded(limit)).status, 200);
        let reply = stage.host.chat(&padded(limit + 1));
        assert_eq!(reply.status, 413);
        assert!(reply.error()["message"].as_str().unwrap().contains(&limit.to_string()));
    }
}

#[test]
fn text_models_say_that_they_take_no_images() {
    let stage = Stage::new(Play::hello());
    let message = refused(&stage, &json!([part(&data_url(&file("tests/pictures/blue-rgba.png")))]));
    assert!(message.contains("`org/scripted model`"), "{message}");
    assert_eq!(ask(&stage, &json!("Hi")).status, 200);
    let card = &stage.host.get("/v1/models").json()["data"][0];
    assert_eq!(card["input_modalities"], json!(["text"]));
    let card = &seeing(|_| {}).host.get("/v1/models").json()["data"][0];
    assert_eq!(card["input_modalities"], json!(["text", "image"]));
}

#[test]
fn only_addresses_of_the_public_internet_are_fetched() {
    let stage = seeing(|options| options.images.fetch = true);
    for (url, clause) in [
        ("http://127.0.0.1:1/", "not public"),
        ("http://localhost:1/a.png", "not public"),
        ("http://[::1]/", "not public"),
        ("http://169.254.169.254/latest/meta-data/", "not public"),
        ("http://192.168.0.1/", "not public"),
        ("http://[::ffff:10.0.0.1]/", "not public"),
        ("http://[64:ff9b::7f00:1]/", "not public"),
        ("http://user:secret@example.com/", "user name"),
        ("https://example.com/a.png", "https"),
        ("file:///etc/passwd", "never fetched"),
        ("http://", "address"),
    ] {
        let message = refused(&stage, &json!([part(url)]));
        assert!(message.contains(clause), "{url}: {message}");
        assert!(!message.contains("secret"), "{message}");
    }
    // Data URLs still are.
    assert_eq!(ask(&stage, &json!([part(&data_url(&file("tests/pictures/blue-rgba.png")))])).status, 200);
}

#[test]
fn what_finds_no_room_is_told_to_come_again() {
    let picture = 96 * 96 * 3;
    let url = data_url(&file("tests/pictures/blue-rgba.png"));
    let hold = Play { images: Some(Budget::default()), ..Play::acts([common::say("Hm"), common::Act::Hold]) };
    // Room for the pictures of one request, and the bodies of a few.
    let stage = Stage::with(hold, |options| options.memory = picture + 10_000);
    let body = json!({"messages": [{"role": "user", "content": [part(&url)]}], "stream": true}).to_string();
    let mut first = stage.host.connect();
    std::io::Write::write_all(
        &mut first,
        common::head("POST", "/v1/chat/completions", &[], &body).as_bytes(),
    )
    .unwrap();
    let start = Instant::now();
    while stage.count() == 0 {
        assert!(start.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(5));
    }
    let second = stage.host.chat(&body);
    assert_eq!((second.status, second.header("retry-after")), (503, Some("1")));
    assert_eq!(second.error()["code"], "busy");
    let large = json!({"messages": [{"role": "user", "content": "x".repeat(20_000)}]}).to_string();
    assert_eq!(stage.host.chat(&large).status, 503);
    drop(first);
    stage.end_within(Duration::from_secs(20));
    // What the first held is free again.
    let mut third = stage.host.connect();
    std::io::Write::write_all(
        &mut third,
        common::head("POST", "/v1/chat/completions", &[], &body).as_bytes(),
    )
    .unwrap();
    let mut status = [0; 12];
    std::io::Read::read_exact(&mut third, &mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
}
