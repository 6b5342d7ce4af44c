//! Pictures in messages: from the JSON of a part to pixels.

mod data;

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use skep_engine::chat::{Content, Image, Message, Part};
use skep_engine::{Budget, Error, ErrorKind, Picture};
use skep_vision::{Limits, decode};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::error::ApiError;
use super::fetch::{self, Fetcher};
use super::fields::{mismatch, whole};
use super::ledger::Held;
use super::model::Card;

/// Which pictures a server takes, if its model takes any.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ImageOptions {
    /// Pictures of a request.
    pub count: usize,
    /// Bytes of a picture's file.
    pub bytes: usize,
    /// Pixels of a picture.
    pub pixels: usize,
    /// Bytes of a request body; of a model that takes no pictures, [`Options::body_limit`](crate::Options) counts.
    pub body_limit: usize,
    /// Fetches pictures that requests name by an `http` address, if it is one of the public internet.
    pub fetch: bool,
    /// How long all pictures of a request may take to be fetched.
    pub fetch_time: Duration,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            count: 32,
            bytes: 20 << 20,
            pixels: 64_000_000,
            body_limit: 64 << 20,
            fetch: false,
            fetch_time: Duration::from_secs(20),
        }
    }
}

/// Pictures decoded at a time. A hostile one may take 16 bytes a pixel meanwhile.
const DECODERS: usize = 1;

/// Collects the pictures of a request's messages, in order, while these are parsed.
pub(super) struct Collector<'a> {
    options: &'a ImageOptions,
    card: &'a Card,
    pub(super) pending: Vec<Pending>,
    /// Why the last part was refused.
    pub(super) refusal: Option<ApiError>,
}

/// A picture that is still to be read.
pub(super) struct Pending {
    /// What errors call it.
    place: String,
    source: Source,
    budget: Option<Budget>,
}

enum Source {
    Address(String),
    File(Vec<u8>),
}

impl<'a> Collector<'a> {
    pub(super) fn new(options: &'a ImageOptions, card: &'a Card) -> Self {
        Self { options, card, pending: Vec::new(), refusal: None }
    }

    /// Takes note of an image part. The result holds its place until [`place`] puts in the picture.
    pub(super) fn part(&mut self, part: &Value, at: &str) -> skep_engine::Result<Image> {
        match self.read(part, at) {
            Ok(pending) => {
                self.pending.push(pending);
                let blank = Picture::new(1, 1, vec![0; 3]);
                blank.map(Image::new).map_err(|error| Error::new(ErrorKind::Request, error.to_string()))
            }
            Err(refusal) => {
                self.refusal = Some(refusal);
                Err(Error::new(ErrorKind::Request, format!("{at} is refused")))
            }
        }
    }

    fn read(&self, part: &Value, at: &str) -> Result<Pending, ApiError> {
        let Self { options, card, pending, .. } = self;
        if card.images.is_none() {
            let message = format!(
                "`{at}` is an image, but the model `{}` takes none; a projector (--mmproj) may change that",
                card.id
            );
            return Err(ApiError::unsupported(at, message));
        }
        if pending.len() == options.count {
            let message = format!("`{at}` is one image too many: a request may hold {}", options.count);
            return Err(ApiError::field(at, message));
        }
        let (url, object) = match part.get("image_url") {
            Some(Value::String(url)) => (url.as_str(), None),
            Some(object @ Value::Object(_)) => match object.get("url") {
                Some(Value::String(url)) => (url.as_str(), Some(object)),
                _ => return Err(ApiError::field(at, format!("`{at}.image_url` has no `url`"))),
            },
            Some(Value::Null) | None if part.get("file_id").is_some() => {
                let message = format!("`{at}` names a file, which is not supported: send a data URL");
                return Err(ApiError::unsupported(at, message));
            }
            _ => return Err(ApiError::field(at, format!("`{at}` has no `image_url`"))),
        };
        let fields = object.into_iter().chain([part]);
        Ok(Pending { place: at.to_owned(), source: self.source(url, at)?, budget: budget(fields, at)? })
    }

    fn source(&self, url: &str, at: &str) -> Result<Source, ApiError> {
        let refused = |clause: &str| Err(ApiError::field(at, format!("`{at}` {clause}")));
        let scheme = url.trim_ascii_start().split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
        match scheme.as_deref() {
            None | Some("data") => match data::decode(url, self.options.bytes) {
                Ok(file) => Ok(Source::File(file)),
                Err(clause) => refused(&clause),
            },
            Some("http" | "https") if self.options.fetch => {
                fetch::check(url).map_err(|clause| ApiError::field(at, format!("`{at}` {clause}")))?;
                Ok(Source::Address(url.to_owned()))
            }
            Some("http" | "https") => {
                refused("is an address, which this server does not fetch: send a data URL")
            }
            Some(_) => refused("has an address of a kind that is never fetched: send a data URL"),
        }
    }
}

/// How many soft tokens an image may take: `max_soft_tokens` says it, else `detail`. The first of the objects that holds
/// a field counts.
fn budget<'v>(
    objects: impl Iterator<Item = &'v Value> + Clone,
    at: &str,
) -> Result<Option<Budget>, ApiError> {
    let field =
        |name: &str| objects.clone().find_map(|object| object.get(name).filter(|value| !value.is_null()));
    if let Some(value) = field("max_soft_tokens") {
        let name = format!("{at}.max_soft_tokens");
        let Some(tokens) = whole(value).and_then(|tokens| usize::try_from(tokens).ok()) else {
            return Err(mismatch(&name, "70, 140, 280, 560 or 1120", value).with_param(at));
        };
        let budget = Budget::new(tokens);
        return budget.map(Some).map_err(|error| ApiError::field(at, format!("`{name}`: {error}")));
    }
    let [low, .., high] = Budget::ALL;
    match field("detail") {
        None => Ok(None),
        Some(Value::String(detail)) if detail == "auto" => Ok(None),
        Some(Value::String(detail)) if detail == "low" => Ok(Some(low)),
        Some(Value::String(detail)) if detail == "high" => Ok(Some(high)),
        Some(other) => {
            Err(mismatch(&format!("{at}.detail"), "`low`, `high` or `auto`", other).with_param(at))
        }
    }
}

/// Reads pictures for all requests.
pub(super) struct Reader {
    pub(super) options: Arc<ImageOptions>,
    fetcher: Fetcher,
    decoders: Arc<Semaphore>,
}

impl Reader {
    pub(super) fn new(options: ImageOptions) -> Self {
        let fetcher = Fetcher::new(options.bytes);
        Self { options: Arc::new(options), fetcher, decoders: Arc::new(Semaphore::new(DECODERS)) }
    }

    /// Fetches and decodes pictures, one after the other. What they occupy is added to `held`.
    pub(super) async fn read(&self, pending: Vec<Pending>, held: &mut Held) -> Result<Vec<Image>, ApiError> {
        let mut images = Vec::with_capacity(pending.len());
        let deadline = Instant::now() + self.options.fetch_time;
        for Pending { place, source, budget } in pending {
            let mut fetched = 0;
            let file = match source {
                Source::File(file) => file,
                Source::Address(address) => {
                    let fetch = self.fetcher.fetch(&address, deadline, |bytes| {
                        fetched += bytes;
                        held.grow(bytes)
                    });
                    let file = fetch.await;
                    file.map_err(|clause| ApiError::field(&place, format!("`{place}` {clause}")))?
                }
            };
            let mut image = Image::new(self.decode(file, &place).await?);
            image.budget = budget;
            held.shrink(fetched);
            let bytes = image.picture.rgb().len();
            if !held.fits(bytes) {
                let message = format!("`{place}` is one image too many: together they have too many pixels");
                return Err(ApiError::field(place, message));
            }
            if !held.grow(bytes) {
                return Err(ApiError::no_room());
            }
            images.push(image);
        }
        Ok(images)
    }

    async fn decode(&self, file: Vec<u8>, place: &str) -> Result<Picture, ApiError> {
        let permit = Arc::clone(&self.decoders).acquire_owned().await;
        let permit = permit.map_err(|_| ApiError::shutting_down())?;
        let limits = limits(&self.options);
        let decoded = tokio::task::spawn_blocking(move || {
            let picture = decode(&file, &limits);
            drop((file, permit));
            picture
        });
        let refused = |clause: String| ApiError::field(place, format!("`{place}`: {clause}"));
        match decoded.await {
            Ok(picture) => picture.map_err(|error| refused(error.to_string())),
            // A decoder that panics has met a file it cannot read.
            Err(_) => Err(refused("the picture cannot be decoded".into())),
        }
    }
}

fn limits(options: &ImageOptions) -> Limits {
    let mut limits = Limits::default();
    limits.bytes = options.bytes;
    limits.pixels = options.pixels;
    limits
}

/// Puts pictures where a [`Collector`] left their places.
pub(super) fn place(messages: &mut [Message], images: Vec<Image>) -> Result<(), ApiError> {
    let parts = messages.iter_mut().flat_map(|message| match &mut message.content {
        Content::Parts(parts) => parts.as_mut_slice(),
        _ => &mut [],
    });
    let mut images = images.into_iter();
    for part in parts {
        if let Part::Image(place) = part {
            *place = images.next().ok_or_else(lost)?;
        }
    }
    images.next().map_or(Ok(()), |_| Err(lost()))
}

fn lost() -> ApiError {
    ApiError::internal("the pictures of the request do not go with their places")
}
