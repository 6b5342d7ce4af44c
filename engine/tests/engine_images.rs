//! Requests with pictures, through the engine's thread.

mod common;

use common::models;
use serde_json::Map;
use skep_engine::chat::{Content, Image, Message, Part, Role};
use skep_engine::{
    Budget, Delta, Engine, EngineOptions, ErrorKind, Event, LoadOptions, Picture, Prompt, Request, Runner,
    Sampling, Sink, ToolChoice, Usage,
};
use std::sync::LazyLock;
use std::sync::mpsc::{self, Receiver, Sender};

static ENGINE: LazyLock<Engine> = LazyLock::new(|| engine(true));

fn engine(projector: bool) -> Engine {
    let mut options = LoadOptions::default();
    options.context = Some(4096);
    options.sequences = 3;
    options.threads = Some(2);
    options.projector = projector.then(|| models().join("tiny-gemma4-mmproj-bf16.gguf"));
    let runner = Runner::load(&models().join("tiny-gemma4-Q4_K_M.gguf"), &options, &mut |_| {}).unwrap();
    Engine::start(runner, EngineOptions::default()).unwrap()
}

struct Channel(Sender<Event>);

impl Sink for Channel {
    fn send(&mut self, event: Event) -> bool {
        self.0.send(event).is_ok()
    }

    fn closed(&self) -> bool {
        false
    }
}

/// Nobody listens: the request is counted and goes no further.
struct Nobody;

impl Sink for Nobody {
    fn send(&mut self, _: Event) -> bool {
        false
    }

    fn closed(&self) -> bool {
        true
    }
}

fn halves(left: [u8; 3], right: [u8; 3]) -> Image {
    let row: Vec<u8> = [left; 48].into_iter().chain([right; 48]).flatten().collect();
    Image::new(Picture::new(96, 96, row.repeat(96)).unwrap())
}

const RED: [u8; 3] = [255, 0, 0];
const BLUE: [u8; 3] = [0, 0, 255];
const YELLOW: [u8; 3] = [255, 255, 0];

fn user(parts: Vec<Part>) -> Message {
    let mut message = Message::text(Role::User, "");
    message.content = Content::Parts(parts);
    message
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn request(messages: Vec<Message>) -> Request {
    let mut sampling = Sampling::default();
    sampling.temperature = 0.0;
    Request {
        prompt: Prompt::Chat {
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            kwargs: Map::new(),
        },
        sampling,
        max_tokens: Some(40),
        stop: Vec::new(),
        ignore_eos: false,
    }
}

fn submit(engine: &Engine, messages: Vec<Message>) -> skep_engine::Result<(usize, Receiver<Event>)> {
    let (sender, receiver) = mpsc::channel();
    let submitted = engine.submit(request(messages), Box::new(Channel(sender)))?;
    Ok((submitted.prompt_tokens, receiver))
}

/// Tokens of the prompt.
fn tokens(messages: Vec<Message>) -> usize {
    ENGINE.submit(request(messages), Box::new(Nobody)).unwrap().prompt_tokens
}

fn answer(events: &Receiver<Event>) -> (String, Usage) {
    let mut content = String::new();
    loop {
        match events.recv().unwrap() {
            Event::Delta(Delta::Content(text)) => content.push_str(&text),
            Event::Finished { usage, .. } => return (content, usage),
            Event::Failed(error) => panic!("{error}"),
            other => panic!("{other:?}"),
        }
    }
}

fn ask(messages: Vec<Message>) -> String {
    let (prompt_tokens, events) = submit(&ENGINE, messages).unwrap();
    let (content, usage) = answer(&events);
    assert_eq!(usage.prompt_tokens, prompt_tokens);
    content
}

#[test]
fn pictures_are_seen_alone_and_in_company() {
    let question = || text("Describe the image.");
    let cases = [
        (halves(RED, BLUE), "The left half is red and the right half is blue."),
        (halves(BLUE, RED), "The left half is blue and the right half is red."),
    ];
    for (image, expected) in &cases {
        assert_eq!(ask(vec![user(vec![Part::Image(image.clone()), question()])]), *expected);
    }
    // At once, and again: what is kept of an image is the image's own.
    let running: Vec<_> = cases
        .iter()
        .map(|(image, expected)| {
            (submit(&ENGINE, vec![user(vec![Part::Image(image.clone()), question()])]).unwrap(), *expected)
        })
        .collect();
    for ((_, events), expected) in running {
        assert_eq!(answer(&events).0, expected);
    }
}

#[test]
fn other_answers_go_on_while_a_picture_is_encoded() {
    let mut long = request(vec![Message::text(Role::User, "What is 3 times 6?")]);
    (long.ignore_eos, long.max_tokens) = (true, Some(400));
    let (sender, running) = mpsc::channel();
    ENGINE.submit(long, Box::new(Channel(sender))).unwrap();
    running.recv().unwrap();
    // It decodes now. The tower takes five stages, and a token of the running answer comes behind each.
    let parts = vec![Part::Image(halves(YELLOW, BLUE)), text("Describe the image.")];
    running.try_iter().for_each(drop);
    let (_, seen) = submit(&ENGINE, vec![user(parts)]).unwrap();
    seen.recv().unwrap();
    let meanwhile = running.try_iter().count();
    answer(&seen);
    assert!(meanwhile >= 5, "{meanwhile} pieces of the other answer came while the picture was encoded");
}

#[test]
fn an_image_takes_its_budget_and_two_markers() {
    let tokens = |parts: Vec<Part>| tokens(vec![user(parts)]);
    let alone = tokens(vec![text("Hi")]);
    for (budget, soft) in [(70, 64), (280, 256), (1120, 1089)] {
        let mut image = halves(RED, BLUE);
        image.budget = Some(Budget::new(budget).unwrap());
        assert_eq!(tokens(vec![Part::Image(image.clone()), text("Hi")]), alone + soft + 2);
        // Several, among text.
        let parts = vec![Part::Image(image.clone()), text("H"), Part::Image(image), text("i")];
        let several = tokens(parts);
        assert!(several >= alone + 2 * (soft + 2) && several <= alone + 2 * (soft + 2) + 2, "{several}");
    }
}

#[test]
fn images_of_earlier_turns_count_and_text_that_spells_the_placeholder_does_not() {
    let turns = |picture: Image| {
        vec![
            user(vec![Part::Image(picture), text("What colour is this image? <|image|>")]),
            Message::text(Role::Assistant, "I will see."),
            Message::text(Role::User, "What is 3 times 6?"),
        ]
    };
    let count = tokens(turns(halves(RED, RED)));
    assert!((256 + 30..256 + 90).contains(&count), "{count}");
}

#[test]
fn without_a_projector_an_image_is_refused_and_text_goes_on() {
    let engine = engine(false);
    assert_eq!(engine.info().images, None);
    assert_eq!(ENGINE.info().images, Some(Budget::default()));
    let error = submit(&engine, vec![user(vec![Part::Image(halves(RED, BLUE)), text("Hi")])]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Request);
    assert!(error.to_string().contains("projector"), "{error}");
    let (_, events) = submit(&engine, vec![Message::text(Role::User, "What is 3 times 6?")]).unwrap();
    assert_eq!(answer(&events).0, "3 times 6 is 18.");
}

#[test]
fn swapped_files_are_named() {
    let model = models().join("tiny-gemma4-Q4_K_M.gguf");
    let projector = models().join("tiny-gemma4-mmproj-bf16.gguf");
    let load = |model: &std::path::Path, projector: &std::path::Path| {
        let mut options = LoadOptions::default();
        options.projector = Some(projector.to_owned());
        match Runner::load(model, &options, &mut |_| {}) {
            Ok(_) => panic!("loaded"),
            Err(error) => error.to_string(),
        }
    };
    assert!(load(&projector, &model).contains("this is a projector"));
    assert!(load(&model, &model).contains("not a projector"), "{}", load(&model, &model));
    let qwen = models().join("tiny-qwen35moe-Q4_K_M.gguf");
    assert!(load(&qwen, &projector).contains("take no projector"));
}
