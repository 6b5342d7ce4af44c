/// Names a sequence of a [`Runner`](crate::Runner): its KV pages and recurrent state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId(pub(crate) usize);

/// Which rows of logits a step returns for a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Want {
    /// One row per token.
    All,
    /// The row of the last token.
    Last,
    /// None: a prefill chunk that is not the last.
    Nothing,
}

/// The next tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// The sequence that they continue.
    pub sequence: SequenceId,
    /// One token when decoding, a chunk of the prompt when prefilling.
    pub tokens: &'a [u32],
    /// Images whose embeddings stand in place of tokens, in order. An image is never split: all of its rows come in one
    /// piece, since they may see each other.
    pub images: &'a [ImageRows<'a>],
    /// Which logits are wanted.
    pub want: Want,
}

/// The embeddings of one image in a piece, as [`Runner::encode_image`](crate::Runner::encode_image) makes them.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct ImageRows<'a> {
    /// Index in the piece's tokens of the first row; the tokens there only hold the place.
    pub at: usize,
    /// `[n, hidden]`: one row per soft token.
    pub rows: &'a [f32],
}

/// Tokens of several sequences that one step runs together; each sequence at most once.
#[derive(Debug, Clone, Default)]
pub struct Batch<'a> {
    pieces: Vec<Piece<'a>>,
}

impl<'a> Batch<'a> {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// A batch of one piece.
    pub fn of(sequence: SequenceId, tokens: &'a [u32], want: Want) -> Self {
        Self { pieces: vec![Piece { sequence, tokens, images: &[], want }] }
    }

    /// Adds a piece.
    pub fn push(&mut self, piece: Piece<'a>) {
        self.pieces.push(piece);
    }

    /// The pieces in order; rows of the batch follow this order.
    pub fn pieces(&self) -> &[Piece<'a>] {
        &self.pieces
    }

    /// Tokens of all pieces.
    pub fn n_tokens(&self) -> usize {
        self.pieces.iter().map(|piece| piece.tokens.len()).sum()
    }

    /// Rows of logits that the step returns.
    pub fn n_logits(&self) -> usize {
        self.pieces
            .iter()
            .map(|piece| match piece.want {
                Want::All => piece.tokens.len(),
                Want::Last => usize::from(!piece.tokens.is_empty()),
                Want::Nothing => 0,
            })
            .sum()
    }
}
