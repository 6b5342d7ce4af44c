use core::ops::Range;

use crate::buffer::Floats;
use crate::shape::Shape;

/// What one sequence carries from token to token in one layer.
///
/// * the convolution window: the last `conv_kernel - 1` rows of `qkv` **as projected** (neither convolved nor activated),
///   oldest first, `[conv_kernel - 1, conv_dim]`;
/// * the recurrent state `S`, `[v_heads, head_k_dim, head_v_dim]`, so that `S[h]` maps a key (row index) to a value (column index).
///
/// Both are f32 and row-major, value heads in the order of the [`Shape`]. A clone is a snapshot.
#[derive(Debug, Clone)]
pub struct State {
    shape: Shape,
    conv: Floats,
    s: Floats,
}

impl State {
    /// The state before the first token: all zeros.
    #[must_use]
    pub fn new(shape: &Shape) -> Self {
        Self {
            shape: *shape,
            conv: Floats::zeroed((shape.conv_kernel() - 1) * shape.conv_dim()),
            s: Floats::zeroed(shape.v_heads() * shape.head_state()),
        }
    }

    /// The shape this state was made for.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The convolution window `[conv_kernel - 1, conv_dim]`, oldest row first.
    #[must_use]
    pub fn conv(&self) -> &[f32] {
        &self.conv
    }

    /// The convolution window, to restore a snapshot kept elsewhere.
    pub fn conv_mut(&mut self) -> &mut [f32] {
        &mut self.conv
    }

    /// The recurrent state `[v_heads, head_k_dim, head_v_dim]`.
    #[must_use]
    pub fn s(&self) -> &[f32] {
        &self.s
    }

    /// The recurrent state, to restore a snapshot kept elsewhere.
    pub fn s_mut(&mut self) -> &mut [f32] {
        &mut self.s
    }

    /// Back to the state before the first token.
    pub fn reset(&mut self) {
        self.conv.fill(0.0);
        self.s.fill(0.0);
    }

    /// Overwrites this state with another, without allocating.
    ///
    /// # Panics
    /// When the shapes differ.
    pub fn copy_from(&mut self, other: &Self) {
        assert_eq!(self.shape, other.shape, "states of different shapes");
        self.conv.copy_from_slice(&other.conv);
        self.s.copy_from_slice(&other.s);
    }

    /// Whether every element is finite. A state that is not stays so, and is to be [`reset`](Self::reset) with its sequence.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        let finite = |values: &[f32]| {
            values.chunks(256).all(|chunk| chunk.iter().fold(true, |all, x| all & x.is_finite()))
        };
        finite(&self.conv) && finite(&self.s)
    }

    /// Size of the window and the recurrent state in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.conv()) + size_of_val(self.s())
    }

    pub(crate) fn parts_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        (&mut self.conv, &mut self.s)
    }
}

/// Consecutive rows of a batch that continue one sequence.
#[derive(Debug)]
pub struct Span<'a> {
    /// The rows, oldest token first.
    pub tokens: Range<usize>,
    /// The state of the sequence, carried forward past these rows.
    pub state: &'a mut State,
}

/// Checks that spans lie in the batch, ascend without overlap, and have states of this shape.
pub(crate) fn assert_spans(shape: &Shape, spans: &[Span<'_>], n: usize) {
    let mut end = 0;
    for span in spans {
        assert!(span.tokens.start <= span.tokens.end, "a span ends before it starts");
        assert!(span.tokens.start >= end, "spans overlap or do not ascend");
        assert!(span.tokens.end <= n, "a span exceeds the batch of {n} tokens");
        assert_eq!(span.state.shape(), shape, "a span's state has another shape");
        end = span.tokens.end;
    }
}
