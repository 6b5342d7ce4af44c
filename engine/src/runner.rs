use crate::batch::{Batch, SequenceId};
use crate::chat::{Image, Template};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{self, Context, DeviceKind};
use crate::graph::{Facts, Graph, Reading, Room, Step};
use crate::images::{Encoder, Images, Placed};
use crate::inspect;
use crate::memory::{Layout, Memory, Storage};
use crate::projector::Projector;
use crate::sampler::Sampling;
use crate::store::{self, Part, Residence, Store};
use crate::tokenizer::Tokenizer;
use skep_attention::KvType;
use skep_gguf::Gguf;
use skep_hal::cpu::Cpu;
use skep_hal::gpu::Device;
use skep_hal::{Pool, Scope};
use skep_quant::{Isa, Parallel, Precision};
use skep_vision::Budget;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to load and run a model.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Threads of the CPU pool; by default one per physical core within the process's quota.
    pub threads: Option<usize>,
    /// Integer dot products, or weights decoded to f32.
    pub precision: Precision,
    /// Tokens that a sequence may hold; by default what the model allows, or less if its KV cache would take more than a
    /// quarter of the available memory.
    pub context: Option<usize>,
    /// Sequences that can be open at once.
    pub sequences: usize,
    /// Type of the KV cache.
    pub kv: KvType,
    /// Where the weights live, on the CPU.
    pub residence: Residence,
    /// What the model runs on.
    pub device: DeviceKind,
    /// The projector beside the model (`mmproj`), which turns pictures into soft tokens.
    pub projector: Option<PathBuf>,
    /// Soft tokens that an image may take where it does not say so itself.
    pub budget: Budget,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            threads: None,
            precision: Precision::Fast,
            context: None,
            sequences: 1,
            kv: KvType::F16,
            residence: Residence::Auto,
            device: DeviceKind::Cpu,
            projector: None,
            budget: Budget::default(),
        }
    }
}

/// What loading is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Reading weights.
    Loading {
        /// Bytes read so far.
        done_bytes: u64,
        /// Bytes to read.
        total_bytes: u64,
    },
}

/// Facts of a loaded model.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ModelInfo {
    /// `general.name`, or the file's name without its ending.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Layers, draft blocks left out.
    pub n_layers: usize,
    /// Entries of the vocabulary.
    pub n_vocab: usize,
    /// Tokens that the model was made for.
    pub context_length: usize,
    /// Tokens that a sequence may hold now.
    pub context: usize,
    /// Bytes of the file, all parts.
    pub file_bytes: u64,
    /// Bytes of weights that one decoded token reads.
    pub active_bytes_per_token: u64,
    /// Bytes of the draft block that was set aside, 0 without one.
    pub draft_bytes: u64,
    /// Threads of the CPU pool.
    pub threads: usize,
    /// Instruction set of the CPU's kernels.
    pub isa: String,
    /// What the model runs on: `cpu`, or a driver and the name of its device.
    pub device: String,
    /// The budget of images in soft tokens; none where the model takes no images.
    pub images: Option<Budget>,
    /// Bytes of the projector's file, 0 without one.
    pub projector_bytes: u64,
    /// What the loader noticed and went on with.
    pub warnings: Vec<String>,
}

/// A loaded model with the memory of its sequences: runs batches.
pub struct Runner {
    info: ModelInfo,
    facts: Facts,
    graph: Box<dyn Graph>,
    store: Store,
    precision: Precision,
    pool: Pool,
    memory: Memory,
    encoder: Option<Encoder>,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<Template>>,
    sampling: Sampling,
}

impl Runner {
    /// Loads a GGUF file, or any part of a split one.
    ///
    /// # Errors
    /// [`ErrorKind::File`] if it is no valid GGUF file, [`ErrorKind::Model`] if it is not a model that can be run, naming the key
    /// or the tensors; [`ErrorKind::Tokenizer`], [`ErrorKind::Template`] and [`ErrorKind::Device`] for what they say.
    pub fn load(path: &Path, options: &LoadOptions, progress: &mut dyn FnMut(Progress)) -> Result<Self> {
        let isa = Isa::detect().map_err(|error| Error::new(ErrorKind::Device, error.to_string()))?;
        let file = store::open(path)?;
        let in_file = |error: Error| Error::new(error.kind(), format!("{}: {error}", path.display()));
        let architecture = file.architecture()?.to_owned();
        let Reading { facts, graph, used } = inspect::read(&file).map_err(in_file)?;
        let tokenizer = Arc::new(Tokenizer::from_gguf(&file).map_err(in_file)?);
        if tokenizer.n_vocab() != facts.vocab {
            return Err(in_file(Error::model(format_args!(
                "the vocabulary has {} entries, but token_embd.weight {} rows",
                tokenizer.n_vocab(),
                facts.vocab
            ))));
        }
        let template = match file.str("tokenizer.chat_template")? {
            Some(source) => Some(Arc::new(Template::new(source).map_err(in_file)?)),
            None => None,
        };
        let sampling = Sampling::from_gguf(&file).map_err(in_file)?;
        let name = match file.str("general.name")? {
            Some(name) if !name.is_empty() => name.to_owned(),
            _ => path
                .file_stem()
                .map_or_else(|| architecture.clone(), |stem| stem.to_string_lossy().into_owned()),
        };

        let encoder = match &options.projector {
            None => None,
            Some(path) => Some(Encoder::new(images(path, &facts, &tokenizer, options)?)),
        };
        let mut warnings = facts.inspection.warnings.clone();
        if let Some(encoder) = &encoder {
            warnings.extend_from_slice(encoder.images().projector().warnings());
        }
        let sequences = options.sequences.max(1);
        let layout = graph.layout();
        let pool = Pool::new(options.threads.unwrap_or_else(|| Cpu::detect().default_threads()))?;
        let file_bytes = file.file_bytes();
        let mut progress = |done_bytes, total_bytes| progress(Progress::Loading { done_bytes, total_bytes });
        let (device, reason) = device(options, &file, &used)?;
        warnings.extend(reason);
        let (device, context, memory, store, graph) = match device {
            None => {
                let available = skep_hal::memory::Memory::detect().available;
                let context = context(&facts, &layout, options, sequences, available)?;
                let memory = Memory::new(&layout, Storage::Host(options.kv), sequences, context)?;
                let store = Store::new(file, &used, options.residence, &mut progress)?;
                ("cpu".to_owned(), context, memory, store, graph)
            }
            Some(device) => {
                let driver = device.driver();
                let name = format!("{} {}", driver.name(), driver.device_name());
                let free = driver.memory()?.free.saturating_sub(store::bytes(&file, &used));
                let context = context(&facts, &layout, options, sequences, Some(free))?;
                let memory = Memory::new(&layout, Storage::Device, sequences, context)?;
                let store = Store::new(file, &used, Residence::Mapped, &mut progress)?;
                let total = store.bytes_of(&used);
                let gpu = Context::new(device)?;
                let graph = pool.enter(|scope| {
                    let mut done = 0;
                    let mut tick = |bytes| {
                        done += bytes;
                        progress(done, total);
                    };
                    let room = Room { sequences, context, kv: options.kv };
                    graph.onto(&gpu, &store, &Team(scope), room, &mut tick)
                })?;
                (name, context, memory, store, graph)
            }
        };
        let info = ModelInfo {
            name,
            architecture,
            n_layers: facts.inspection.layers.len(),
            n_vocab: facts.vocab,
            context_length: facts.context,
            context,
            file_bytes,
            active_bytes_per_token: facts.inspection.active_bytes_per_token,
            draft_bytes: facts.inspection.draft_bytes,
            threads: pool.threads(),
            isa: isa.name().to_owned(),
            device,
            images: encoder.as_ref().map(|encoder| encoder.images().budget()),
            projector_bytes: encoder.as_ref().map_or(0, |encoder| encoder.images().projector().file_bytes()),
            warnings,
        };
        Ok(Self {
            info,
            facts,
            graph,
            store,
            precision: options.precision,
            pool,
            memory,
            encoder,
            tokenizer,
            template,
            sampling,
        })
    }

    /// Facts of the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The tokenizer of the file.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template of the file.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_deref()
    }

    pub(crate) fn shared_tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    pub(crate) fn shared_template(&self) -> Option<&Arc<Template>> {
        self.template.as_ref()
    }

    /// Sampling settings that the file recommends.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    pub(crate) fn images(&self) -> Option<&Images> {
        self.encoder.as_ref().map(Encoder::images)
    }

    /// Soft tokens that an image takes, without the markers around them.
    ///
    /// # Errors
    /// [`ErrorKind::Request`] if the model was loaded without a projector, or the picture cannot be brought to a size that fits
    /// the budget.
    pub fn image_tokens(&self, image: &Image) -> Result<usize> {
        self.images().ok_or_else(blind)?.soft_tokens(image)
    }

    /// The embeddings of an image, `[image_tokens, hidden]`, to stand in a [`Piece`](crate::Piece). What was encoded last is
    /// kept, and recognised by its pixels.
    ///
    /// # Errors
    /// As [`image_tokens`](Self::image_tokens).
    pub fn encode_image(&mut self, image: &Image) -> Result<Arc<[f32]>> {
        let images = self.images().ok_or_else(blind)?;
        let placed =
            Placed { at: 0, len: images.soft_tokens(image)?, key: images.key(image), image: image.clone() };
        loop {
            if let Some(rows) = self.look(&placed)? {
                return Ok(rows);
            }
        }
    }

    /// Comes nearer to the embeddings of an image of a prompt, by one stage of the tower, and returns them when they are there.
    pub(crate) fn look(&mut self, placed: &Placed) -> Result<Option<Arc<[f32]>>> {
        let encoder = self.encoder.as_mut().ok_or_else(blind)?;
        let precision = self.precision;
        self.pool.enter(|scope| encoder.advance(&Team(scope), precision, &placed.image, placed.key))
    }

    /// Opens an empty sequence, with cleared state.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if all are in use.
    pub fn open(&mut self) -> Result<SequenceId> {
        self.memory.open()
    }

    /// Ends a sequence and gives its memory back.
    pub fn close(&mut self, sequence: SequenceId) {
        self.memory.close(sequence);
    }

    /// Tokens that a sequence holds.
    pub fn len(&self, sequence: SequenceId) -> usize {
        self.memory.len(sequence)
    }

    /// Runs one step and returns its logits, `[batch.n_logits(), n_vocab]` in the order of the pieces.
    ///
    /// # Errors
    /// [`ErrorKind::ContextLength`] if a sequence would grow over its context, [`ErrorKind::Request`] for a token outside the
    /// vocabulary or a sequence that is not open or stands twice in the batch: nothing has changed then. After any other
    /// error the sequences of the batch must be closed.
    pub fn step(&mut self, batch: &Batch<'_>) -> Result<&[f32]> {
        self.check(batch)?;
        for piece in batch.pieces() {
            self.memory.reserve(piece.sequence, piece.tokens.len())?;
        }
        let Self { graph, store, precision, memory, .. } = self;
        let (store, precision) = (&*store, *precision);
        self.pool.enter(|scope| {
            let par = &Team(scope);
            graph.forward(&Step { par, store, precision }, memory, batch)
        })?;
        Ok(self.graph.logits())
    }

    fn check(&self, batch: &Batch<'_>) -> Result<()> {
        let request = |message: String| Err(Error::new(ErrorKind::Request, message));
        for (index, piece) in batch.pieces().iter().enumerate() {
            if let Some(token) = piece.tokens.iter().find(|&&token| token as usize >= self.facts.vocab) {
                return request(format!("token {token} is outside the vocabulary of {}", self.facts.vocab));
            }
            if batch.pieces()[..index].iter().any(|other| other.sequence == piece.sequence) {
                return request(format!("sequence {} stands twice in a batch", piece.sequence.0));
            }
            if !piece.images.is_empty() && !self.facts.images {
                return request("this model takes no images".to_owned());
            }
            let (mut free, hidden) = (0, self.facts.hidden);
            for image in piece.images {
                let (rows, rest) = (image.rows.len() / hidden, image.rows.len() % hidden);
                let end = image.at.saturating_add(rows);
                if rows == 0 || rest != 0 || image.at < free || end > piece.tokens.len() {
                    return request(format!(
                        "an image of {} numbers at token {} of a piece of {} does not fit",
                        image.rows.len(),
                        image.at,
                        piece.tokens.len()
                    ));
                }
                free = end;
            }
        }
        Ok(())
    }
}

/// The device to run on, `None` for the CPU; and why it is not what was hoped for.
fn device(
    options: &LoadOptions,
    file: &Gguf<Part>,
    used: &[bool],
) -> Result<(Option<Device>, Option<String>)> {
    let Some(device) = gpu::open(options.device)? else { return Ok((None, None)) };
    let weights = store::bytes(file, used);
    let free = device.driver().memory()?.free;
    let name = device.driver().device_name();
    let refusal = if options.precision == Precision::Exact {
        Some(format!("{name} computes with quantised weights only: exact arithmetic needs the CPU"))
    } else if weights > free {
        Some(format!("the weights take {weights} bytes, but {name} has {free} bytes free"))
    } else {
        None
    };
    match refusal {
        None => Ok((Some(device), None)),
        Some(reason) if options.device == DeviceKind::Auto => {
            Ok((None, Some(format!("running on the CPU: {reason}"))))
        }
        Some(reason) => Err(Error::new(ErrorKind::Device, reason)),
    }
}

/// The projector beside a model.
fn images(path: &Path, facts: &Facts, tokenizer: &Tokenizer, options: &LoadOptions) -> Result<Images> {
    let refused = |message: &str| Error::model(format_args!("{}: {message}", path.display()));
    if !facts.images {
        return Err(refused("models of this architecture take no projector"));
    }
    let markers = tokenizer
        .image_markers()
        .ok_or_else(|| refused("the model's vocabulary has no tokens for images: it takes no projector"))?;
    let projector = Projector::load(path, facts.hidden, options.residence)?;
    Ok(Images::new(projector, options.budget, markers))
}

/// The error of an image without a projector.
pub(crate) fn blind() -> Error {
    Error::new(ErrorKind::Request, "the model takes no images: it was loaded without a projector (mmproj)")
}

/// The context of each sequence: as asked, or what the model allows within a quarter of the available memory.
fn context(
    facts: &Facts,
    layout: &Layout,
    options: &LoadOptions,
    sequences: usize,
    available: Option<u64>,
) -> Result<usize> {
    if let Some(context) = options.context {
        if context == 0 || context > facts.context {
            let message =
                format!("a context of {context} was asked for, but the model allows 1 to {}", facts.context);
            return Err(Error::new(ErrorKind::Request, message));
        }
        return Ok(context);
    }
    const FLOOR: usize = 4096;
    let windows = layout.window_bytes(options.kv, facts.context) * sequences as u64;
    let per_token = layout.bytes_per_token(options.kv).max(1) * sequences as u64;
    let affordable = available.map_or(u64::MAX, |bytes| (bytes / 4).saturating_sub(windows) / per_token);
    Ok(usize::try_from(affordable).unwrap_or(usize::MAX).max(FLOOR).min(facts.context))
}

/// Lends a scope of the pool to the compute crates.
pub(crate) struct Team<'s, 'p>(pub(crate) &'s Scope<'p>);

// SAFETY: `Scope::run` calls the body once for every chunk and returns after the last call has returned.
unsafe impl Parallel for Team<'_, '_> {
    fn workers(&self) -> usize {
        self.0.workers()
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.run(chunks, body);
    }
}
