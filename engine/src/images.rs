//! Pictures in prompts: how many tokens they take, where they stand, and what the projector makes of them.

use crate::chat::Image;
use crate::error::{Error, ErrorKind, Result};
use crate::projector::Projector;
use crate::tokenizer::ImageMarkers;
use skep_quant::{Parallel, Precision};
use skep_vision::{Budget, Patches, Scratch};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of encoded images that are kept: a conversation sends its pictures again with every turn.
const KEPT_BYTES: usize = 64 << 20;

/// What turns pictures into soft tokens, as far as preparing a prompt needs it.
#[derive(Clone)]
pub(crate) struct Images {
    projector: Arc<Projector>,
    budget: Budget,
    markers: ImageMarkers,
}

/// An image in a prompt.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    /// Index of its first soft token.
    pub(crate) at: usize,
    /// Its soft tokens.
    pub(crate) len: usize,
    pub(crate) image: Image,
    pub(crate) key: Key,
}

/// What an encoded image depends on: the pixels, by their digest, and the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    digest: [u8; 32],
    budget: Budget,
}

impl Images {
    pub(crate) fn new(projector: Projector, budget: Budget, markers: ImageMarkers) -> Self {
        Self { projector: Arc::new(projector), budget, markers }
    }

    pub(crate) fn projector(&self) -> &Projector {
        &self.projector
    }

    /// The default budget of an image.
    pub(crate) fn budget(&self) -> Budget {
        self.budget
    }

    /// Soft tokens of an image, markers not counted.
    pub(crate) fn soft_tokens(&self, image: &Image) -> Result<usize> {
        self.projector.soft_tokens(&image.picture, image.budget.unwrap_or(self.budget))
    }

    /// Puts the images in the places of `ids` that wait for them: in the place of each placeholder come the begin marker, as
    /// many placeholders as the image has soft tokens, and the end marker.
    pub(crate) fn expand(&self, ids: &[u32], images: Vec<Image>) -> Result<(Vec<u32>, Vec<Placed>)> {
        let (mut tokens, mut placed) = (Vec::with_capacity(ids.len()), Vec::with_capacity(images.len()));
        let mut images = images.into_iter();
        for &id in ids {
            if id != self.markers.soft {
                tokens.push(id);
                continue;
            }
            let image = images.next().ok_or_else(|| uneven("more"))?;
            let len = self.soft_tokens(&image)?;
            tokens.push(self.markers.begin);
            placed.push(Placed { at: tokens.len(), len, key: self.key(&image), image });
            tokens.extend(std::iter::repeat_n(self.markers.soft, len));
            tokens.push(self.markers.end);
        }
        match images.next() {
            None => Ok((tokens, placed)),
            Some(_) => Err(uneven("fewer")),
        }
    }

    pub(crate) fn key(&self, image: &Image) -> Key {
        Key { digest: image.picture.digest(), budget: image.budget.unwrap_or(self.budget) }
    }
}

fn uneven(how: &str) -> Error {
    let message = format!("the chat template leaves {how} places for images than the messages have images");
    Error::new(ErrorKind::Template, message)
}

/// Encodes images, and keeps what it made last.
pub(crate) struct Encoder {
    images: Images,
    scratch: Scratch,
    current: Option<Encoding>,
    recent: VecDeque<(Key, Arc<[f32]>)>,
    recent_bytes: usize,
}

/// An image between two stages of the tower.
struct Encoding {
    key: Key,
    patches: Patches,
    stage: usize,
    rows: Vec<f32>,
}

impl Encoder {
    pub(crate) fn new(images: Images) -> Self {
        Self { images, scratch: Scratch::new(), current: None, recent: VecDeque::new(), recent_bytes: 0 }
    }

    pub(crate) fn images(&self) -> &Images {
        &self.images
    }

    /// Comes nearer to the rows of an image, `[n_soft_tokens, hidden]`, by one stage of the tower; they are returned when they
    /// are there. An image that was begun before and not ended is forgotten.
    pub(crate) fn advance(
        &mut self,
        par: &dyn Parallel,
        precision: Precision,
        image: &Image,
        key: Key,
    ) -> Result<Option<Arc<[f32]>>> {
        if let Some(rows) = self.recall(key) {
            return Ok(Some(rows));
        }
        let projector = &self.images.projector;
        let mut encoding = match self.current.take_if(|current| current.key == key) {
            Some(encoding) => encoding,
            None => {
                let patches = projector.cut(par, &image.picture, key.budget)?;
                Encoding { key, patches, stage: 0, rows: Vec::new() }
            }
        };
        let Encoding { patches, stage, rows, .. } = &mut encoding;
        let complete = projector.encode_stage(par, patches, precision, *stage, &mut self.scratch, rows)?;
        *stage += 1;
        if complete {
            self.current = None;
            return Ok(Some(self.keep(key, encoding.rows.into())));
        }
        self.current = Some(encoding);
        Ok(None)
    }

    fn recall(&mut self, key: Key) -> Option<Arc<[f32]>> {
        let at = self.recent.iter().position(|(kept, _)| *kept == key)?;
        let (key, rows) = self.recent.remove(at)?;
        self.recent.push_back((key, Arc::clone(&rows)));
        Some(rows)
    }

    fn keep(&mut self, key: Key, rows: Arc<[f32]>) -> Arc<[f32]> {
        self.recent_bytes += size_of_val(&*rows);
        self.recent.push_back((key, Arc::clone(&rows)));
        while self.recent_bytes > KEPT_BYTES
            && let Some((_, oldest)) = self.recent.pop_front()
        {
            self.recent_bytes -= size_of_val(&*oldest);
        }
        rows
    }
}
