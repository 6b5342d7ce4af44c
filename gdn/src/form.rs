/// Tokens per chunk of the chunked form.
pub const CHUNK: usize = 64;

/// Which of the two mathematically equal forms of the delta rule computes a span.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Form {
    /// The faster one for the span's length on this machine. The choice depends on the length of the span only, so cutting a
    /// sequence differently may change results by f32 rounding.
    #[default]
    Auto,
    /// [`CHUNK`] tokens at a time through small matrix products, chunks counted from the start of the span. Cutting a sequence
    /// at multiples of [`CHUNK`] gives identical bits, elsewhere the results agree to f32 rounding.
    Chunked,
    /// Token by token. Results are identical bits however a sequence is cut into spans.
    Recurrent,
}
