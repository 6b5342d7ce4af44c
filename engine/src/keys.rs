//! The metadata of a model: values by key, each checked where it is read.

use crate::error::{Error, Result};
use skep_gguf::Gguf;

/// The metadata of one architecture.
pub(crate) struct Keys<'f, B> {
    pub(crate) file: &'f Gguf<B>,
    pub(crate) prefix: &'f str,
}

impl<'f, B: AsRef<[u8]>> Keys<'f, B> {
    pub(crate) fn new(file: &'f Gguf<B>) -> Result<Self> {
        Ok(Self { file, prefix: file.architecture()? })
    }

    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
        Error::model(format_args!("missing metadata key {}", self.name(key)))
    }

    pub(crate) fn usize(&self, key: &str) -> Result<usize> {
        self.file.usize(&self.name(key))?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn nonzero(&self, key: &str) -> Result<usize> {
        match self.usize(key)? {
            0 => Err(Error::model(format_args!("{} is 0", self.name(key)))),
            n => Ok(n),
        }
    }

    pub(crate) fn f32(&self, key: &str) -> Result<f32> {
        let value = self.file.f32(&self.name(key))?.ok_or_else(|| self.missing(key))?;
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(Error::model(format_args!("{} is {value}, not a positive number", self.name(key))))
        }
    }

    /// A count that is given once or per layer: the one value that is not zero.
    pub(crate) fn single(&self, key: &str) -> Result<usize> {
        let name = self.name(key);
        let values = self.file.per_layer_usize(&name)?.ok_or_else(|| self.missing(key))?;
        match values.distinct_nonzero().as_slice() {
            [one] => Ok(*one),
            [] => Err(Error::model(format_args!("{name} is 0 for every layer"))),
            several => Err(Error::model(format_args!(
                "{name} differs between layers ({several:?}), which this architecture does not allow"
            ))),
        }
    }

    /// A count that is given once or per layer, for each of `layers` layers.
    pub(crate) fn per_layer(&self, key: &str, layers: usize) -> Result<Vec<usize>> {
        let name = self.name(key);
        let values = self.file.per_layer_usize(&name)?.ok_or_else(|| self.missing(key))?;
        (0..layers)
            .map(|layer| {
                values
                    .at(layer)
                    .ok_or_else(|| Error::model(format_args!("{name} has no entry for layer {layer}")))
            })
            .collect()
    }

    /// Experts of a layer and how many of them a token uses.
    pub(crate) fn experts(&self) -> Result<(usize, usize)> {
        let (experts, used) = (self.usize("expert_count")?, self.usize("expert_used_count")?);
        if used == 0 || used > experts {
            return Err(Error::model(format_args!(
                "{0}.expert_used_count {used} does not go with {0}.expert_count {experts}",
                self.prefix
            )));
        }
        Ok((experts, used))
    }

    /// Rows of the token embedding.
    pub(crate) fn vocab(&self) -> Result<usize> {
        let embedding = self.file.tensor("token_embd.weight");
        let embedding = embedding.ok_or_else(|| Error::model("missing tensors: token_embd.weight"))?;
        Ok(embedding.shape().get(1).copied().unwrap_or(1) as usize)
    }
}

/// Splits `blk.3.attn_q.weight` into 3 and `attn_q.weight`.
pub(crate) fn block_tensor(name: &str) -> Option<(usize, &str)> {
    let (index, role) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((index.parse().ok()?, role))
}
