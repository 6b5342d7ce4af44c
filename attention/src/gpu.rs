//! The same layer on a GPU: what [`prepare`](crate::prepare()) and [`attend`](crate::attend()) do, as kernels in the language
//! of `skep-hal`.
//!
//! Everything a step works on lies in device memory, and what changes from step to step (positions, page tables, context
//! lengths) is read there, so that a step with a fixed number of rows can be captured as a graph and launched again. Page
//! tables and sequence slots are not checked on the host: whatever they hold, kernels stay within the memory they were given, and rows
//! whose slot is none of the table's leave nothing in the cache.
//!
//! Heads have sizes that are multiples of 8, up to [`MAX_DIM`], and a key/value head is shared by at most [`MAX_GROUP`] query heads.

mod attend;
mod cache;
mod prepare;
mod rope;

pub use attend::Scratch;
pub use cache::{Cache, PAGE};
pub use rope::{Positions, RopeTable};

use crate::Heads;
use skep_hal::Result;
use skep_hal::gpu::{Device, Entry, Kernel, Source, View};

/// Largest head.
pub const MAX_DIM: usize = 512;

/// Most query heads of a key/value head.
pub const MAX_GROUP: usize = 16;

/// Bytes of a float, and of an index.
pub(crate) const WORD: usize = 4;

/// Head sizes that kernels are made for; others run in the next larger one.
const DIMS: [usize; 4] = [64, 128, 256, 512];

/// Query heads that a decoding block takes.
const GROUPS: [usize; 3] = [2, 4, 8];

macro_rules! entries {
    ($($name:literal $threads:literal),* $(,)?) => {
        &[$(Entry { name: $name, threads: $threads }),*]
    };
}

/// The kernels of this crate.
pub const SOURCE: Source = Source {
    name: "attention",
    parts: &[
        skep_quant::gpu::ROWS,
        include_str!("../kernels/attn.gpu.h"),
        include_str!("../kernels/prepare.gpu.h"),
        include_str!("../kernels/decode.gpu.h"),
        include_str!("../kernels/prefill.gpu.h"),
    ],
    entries: entries! {
        "attn_rope_table" 128, "attn_prepare_f16" 256, "attn_prepare_f32" 256, "attn_merge" 256, "attn_forms" 256,
        "attn_decode_f16_64_2" 256, "attn_decode_f16_64_4" 256, "attn_decode_f16_64_8" 256,
        "attn_decode_f16_128_2" 256, "attn_decode_f16_128_4" 256, "attn_decode_f16_128_8" 256,
        "attn_decode_f16_256_2" 256, "attn_decode_f16_256_4" 256, "attn_decode_f16_256_8" 256,
        "attn_decode_f16_512_2" 256, "attn_decode_f16_512_4" 256,
        "attn_decode_f32_64_2" 256, "attn_decode_f32_64_4" 256, "attn_decode_f32_64_8" 256,
        "attn_decode_f32_128_2" 256, "attn_decode_f32_128_4" 256, "attn_decode_f32_128_8" 256,
        "attn_decode_f32_256_2" 256, "attn_decode_f32_256_4" 256, "attn_decode_f32_256_8" 256,
        "attn_decode_f32_512_2" 256, "attn_decode_f32_512_4" 256,
        "attn_prefill_f16_64" 256, "attn_prefill_f16_128" 256, "attn_prefill_f16_256" 256, "attn_prefill_f16_512" 256,
        "attn_prefill_f32_64" 256, "attn_prefill_f32_128" 256, "attn_prefill_f32_256" 256, "attn_prefill_f32_512" 256,
    },
};

/// Loaded kernels.
#[derive(Debug)]
pub struct Kernels {
    rope_table: Kernel,
    merge: Kernel,
    forms: Kernel,
    f16: Typed,
    f32: Typed,
}

/// Kernels of one cache format.
#[derive(Debug)]
struct Typed {
    prepare: Kernel,
    /// By head size and query heads of a block; the largest size has none of the widest.
    decode: [[Option<Kernel>; 3]; 4],
    /// By head size.
    prefill: [Kernel; 4],
}

macro_rules! typed {
    ($module:ident, $ty:literal) => {{
        macro_rules! decode {
            ($name:literal) => {
                Some($module.kernel(concat!("attn_decode_", $ty, "_", $name))?)
            };
        }
        Typed {
            prepare: $module.kernel(concat!("attn_prepare_", $ty))?,
            decode: [
                [decode!("64_2"), decode!("64_4"), decode!("64_8")],
                [decode!("128_2"), decode!("128_4"), decode!("128_8")],
                [decode!("256_2"), decode!("256_4"), decode!("256_8")],
                [decode!("512_2"), decode!("512_4"), None],
            ],
            prefill: [
                $module.kernel(concat!("attn_prefill_", $ty, "_64"))?,
                $module.kernel(concat!("attn_prefill_", $ty, "_128"))?,
                $module.kernel(concat!("attn_prefill_", $ty, "_256"))?,
                $module.kernel(concat!("attn_prefill_", $ty, "_512"))?,
            ],
        }
    }};
}

impl Kernels {
    /// Loads the kernels, compiling them where no object is at hand.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load(device: &Device) -> Result<Self> {
        let module = device.module(&SOURCE)?;
        Ok(Self {
            rope_table: module.kernel("attn_rope_table")?,
            merge: module.kernel("attn_merge")?,
            forms: module.kernel("attn_forms")?,
            f16: typed!(module, "f16"),
            f32: typed!(module, "f32"),
        })
    }

    fn typed(&self, cache: &Cache) -> &Typed {
        match cache.ty() {
            crate::KvType::F16 => &self.f16,
            crate::KvType::F32 => &self.f32,
        }
    }
}

/// Rows of a matrix of floats, `stride` floats from one to the next: the output of a product, or some columns of it.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Rows<'m> {
    /// The first row and all that follows.
    pub view: View<'m>,
    /// Floats from the start of a row to the start of the next.
    pub stride: usize,
}

/// Query projection of a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Queries<'m> {
    /// `[rows, q_heads * head_dim]`.
    Plain(Rows<'m>),
    /// `[rows, q_heads * 2 * head_dim]`: for each head its query, then its output gate.
    GateInterleaved(Rows<'m>),
}

/// Output gate of a step: every attention output is multiplied by the logistic function of its gate.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Gate<'m> {
    /// `[rows, q_heads * v_dim]`.
    Plain(Rows<'m>),
    /// `[rows, q_heads * 2 * head_dim]`, the second half of each head being the gate; needs `v_dim == head_dim`.
    Interleaved(Rows<'m>),
}

/// Projections of a step.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Projections<'m> {
    /// Queries, with or without gates.
    pub q: Queries<'m>,
    /// Keys, `[rows, kv_heads * head_dim]`.
    pub k: Rows<'m>,
    /// Values, `[rows, kv_heads * v_dim]`; may be the keys.
    pub v: Rows<'m>,
}

/// RMS normalisation of each head, as [`crate::Norm`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Norm<'m> {
    /// Not normalised.
    #[default]
    None,
    /// Normalised, no weight.
    Unit,
    /// Normalised and multiplied by this weight, floats `[head_dim]`, or `[v_dim]` for values.
    Weight(View<'m>),
}

/// Normalisations of queries, keys and values; the default is none.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Norms<'m> {
    /// Of each query head, before the rotation.
    pub q: Norm<'m>,
    /// Of each key head, before the rotation.
    pub k: Norm<'m>,
    /// Of each value head.
    pub v: Norm<'m>,
    /// Added to the mean square.
    pub eps: f32,
}

/// The rows of a step and where the tokens of their sequences live. All arrays are `u32` in device memory.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Batch<'m> {
    /// Number of rows.
    pub rows: usize,
    /// `[rows]`: sequence slot of each row. A row whose slot is none of the table's is of no sequence.
    pub slot: View<'m>,
    /// `[rows]`: token index of each row in its sequence.
    pub position: View<'m>,
    /// `[rows]`: one past the last token that each row sees. Without it a row sees no token after its own; with it the tokens of an
    /// image can see each other.
    pub end: Option<View<'m>>,
    /// Number of spans: consecutive rows that are consecutive tokens of one sequence.
    pub spans: usize,
    /// `[spans, 4]`: slot, first row, number of rows, token index of the first row. The spans cover all rows in order.
    pub span: View<'m>,
    /// Number of sequence slots.
    pub slots: usize,
    /// Entries of each slot's page table.
    pub max_pages: usize,
    /// `[slots, max_pages]`: token `i` of a slot lives in row `i % 64` of page `pages[slot, i / 64]`. Only the entries of tokens that a
    /// row sees are looked at.
    pub pages: View<'m>,
}

impl Batch<'_> {
    fn check(&self) {
        words("slot", self.slot, self.rows);
        words("position", self.position, self.rows);
        if let Some(end) = self.end {
            words("end", end, self.rows);
        }
        words("span", self.span, 4 * self.spans);
        words("pages", self.pages, self.slots * self.max_pages);
        assert!(self.slots > 0 && self.max_pages > 0, "a batch needs a page table");
    }
}

impl Rows<'_> {
    fn check(&self, name: &str, rows: usize, cols: usize) {
        assert!(self.stride >= cols, "{name} rows of {cols} floats are {} apart", self.stride);
        assert!(
            self.stride.is_multiple_of(4) && self.view.pointer().0.is_multiple_of(16),
            "{name} rows must be aligned to 16 bytes"
        );
        words(name, self.view, if rows == 0 { 0 } else { (rows - 1) * self.stride + cols });
    }
}

impl<'m> Norm<'m> {
    /// Whether to normalise, and by what weight.
    fn check(self, name: &str, dim: usize) -> (bool, Option<View<'m>>) {
        match self {
            Norm::None => (false, None),
            Norm::Unit => (true, None),
            Norm::Weight(weight) => {
                words(name, weight, dim);
                (true, Some(weight))
            }
        }
    }
}

/// Panics unless kernels are made for such heads.
fn check_heads(heads: &Heads) {
    for (name, dim) in [("head_dim", heads.head_dim()), ("v_dim", heads.v_dim())] {
        assert!(
            dim.is_multiple_of(8) && dim <= MAX_DIM,
            "{name} {dim} must be a multiple of 8, at most {MAX_DIM}"
        );
    }
    let group = heads.group();
    assert!(group <= MAX_GROUP, "{group} query heads of a key/value head, at most {MAX_GROUP}");
}

/// Index of the kernels that a layer runs in.
fn size_class(heads: &Heads) -> usize {
    let dim = heads.head_dim().max(heads.v_dim());
    DIMS.iter().position(|&class| dim <= class).expect("heads that were checked")
}

/// Panics unless `view` has room for `len` words.
fn words(name: &str, view: View<'_>, len: usize) {
    assert!(view.bytes() >= len * WORD, "{name} has {} bytes, but {len} words are needed", view.bytes());
}
