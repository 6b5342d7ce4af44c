use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use skep_engine::FinishReason;

use super::error::ApiError;

/// What all parts of one answer share.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: &'static str,
}

impl Head {
    pub(super) fn new(prefix: &str, object: &'static str, model: &str) -> Self {
        Self {
            id: format!("{prefix}-{}", unique()),
            object,
            created: now(),
            model: model.to_owned(),
            system_fingerprint: concat!("skep-", env!("CARGO_PKG_VERSION")),
        }
    }
}

/// Token counts in OpenAI's shape.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl From<skep_engine::Usage> for Usage {
    fn from(usage: skep_engine::Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: 0 },
        }
    }
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub(super) struct Whole<C> {
    #[serde(flatten)]
    pub(super) head: Head,
    pub(super) choices: [C; 1],
    pub(super) usage: Usage,
}

/// A part of a streamed answer.
#[derive(Debug, Serialize)]
pub(super) struct Part<'a, C> {
    #[serde(flatten)]
    pub(super) head: &'a Head,
    pub(super) choices: &'a [C],
    /// Absent unless asked for; then `null` in all parts but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
}

pub(super) fn finish_reason(reason: FinishReason) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::ToolCalls => Ok("tool_calls"),
        #[allow(unreachable_patterns, reason = "the enum may grow")]
        other => Err(ApiError::internal(format!("the answer ended for an unknown reason: {other:?}"))),
    }
}

/// The JSON text of our own types, which have string keys and finite numbers only.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// 32 hexadecimal digits that no other answer has.
fn unique() -> String {
    format!("{:016x}{:016x}", random(), random())
}

/// A number nobody can foresee well enough to meet it by chance; not for secrets.
fn random() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // The keys of the hasher are random once per thread, and the count and the time differ from call to call.
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    RandomState::new().hash_one((COUNT.fetch_add(1, Ordering::Relaxed), time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| unique()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 32));
    }
}
