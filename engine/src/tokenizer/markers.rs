//! Tokens that steer a conversation, by their text.

/// The tokens that give an image its place in a prompt: `begin`, one `soft` for each row of the image, `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageMarkers {
    /// Before an image.
    pub begin: u32,
    /// In place of each row of an image; a template writes one for the whole image.
    pub soft: u32,
    /// Behind an image.
    pub end: u32,
}

/// The well-known special tokens of a family. Files type some of them wrongly.
#[derive(Debug)]
pub(super) struct Markers {
    /// Not shown, and never made from user text: CONTROL.
    pub(super) control: &'static [&'static str],
    /// One token wherever the text appears, and shown to the reader of an answer: USER_DEFINED.
    pub(super) shown: &'static [&'static str],
    /// Those that end a generation even when no key of the file names them.
    pub(super) ends: &'static [&'static str],
    /// Those that must not be generated.
    pub(super) suppressed: &'static [&'static str],
    /// Before, in and behind an image.
    pub(super) image: Option<[&'static str; 3]>,
    /// Whether users must not write those that are shown, either.
    pub(super) guards_shown: bool,
}

/// Families with a byte-level alphabet.
pub(super) const BYTE_LEVEL: Markers = Markers {
    control: &[
        "<|begin_of_text|>",
        "<|end_header_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|start_header_id|>",
    ],
    shown: &["</think>", "</tool_call>", "</tool_response>", "<think>", "<tool_call>", "<tool_response>"],
    ends: &["<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"],
    suppressed: &[],
    image: None,
    guards_shown: false,
};

/// Gemma 4, as in the vocabulary published with it.
pub(super) const GEMMA: Markers = Markers {
    control: &[
        "<audio|>",
        "<bos>",
        "<eos>",
        "<image|>",
        "<mask>",
        "<pad>",
        "<tool|>",
        "<turn|>",
        "<unk>",
        "<|audio>",
        "<|audio|>",
        "<|image>",
        "<|image|>",
        "<|think|>",
        "<|tool>",
        "<|turn>",
        "<|video|>",
    ],
    shown: &[
        "<channel|>",
        "<tool_call|>",
        "<tool_response|>",
        "<|\"|>",
        "<|channel>",
        "<|tool_call>",
        "<|tool_response>",
    ],
    // Behind a call the model waits for the response, whose first token it writes itself.
    ends: &["<eos>", "<turn|>", "<|tool_response>"],
    suppressed: &["<audio|>", "<image|>", "<|audio>", "<|audio|>", "<|image>", "<|image|>", "<|video|>"],
    image: Some(["<|image>", "<|image|>", "<image|>"]),
    guards_shown: true,
};
