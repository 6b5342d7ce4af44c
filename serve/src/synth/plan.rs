//! The tensors of a synthetic model: names, shapes, types and the spread of their values.

use skep_gguf::Writer;
use skep_quant::Type;

/// A model whose shapes can be written.
pub(crate) trait Shapes {
    /// Sets every key, in file order.
    fn metadata(&self, writer: &mut Writer) -> skep_gguf::Result<()>;

    /// Every tensor, in file order, with the types that llama.cpp gives them.
    fn tensors(&self) -> Vec<Planned>;
}

/// Sets the keys that every file has.
pub(crate) fn general(
    writer: &mut Writer,
    architecture: &str,
    name: &str,
    layers: usize,
    file_type: u32,
) -> skep_gguf::Result<()> {
    writer.set("general.architecture", architecture)?;
    writer.set("general.name", format!("{name}-synthetic-{layers}-layers").as_str())?;
    writer.set("general.quantization_version", 2_u32)?;
    writer.set("general.file_type", file_type)?;
    Ok(())
}

/// What a tensor is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Content {
    /// The same number everywhere.
    Constant(f32),
    /// Decay rates between -0.5 and -0.005.
    Decays,
    /// The token embedding: random, but for the first feature, which is about the same for every token.
    Embedding { std: f32, feature: f32 },
    /// Random with this standard deviation; outputs into the residual stream leave its first feature alone.
    Random { std: f32, residual: bool },
    /// Router rows: random, and with a skew that reads the constant first feature.
    Router { std: f32 },
    /// Divisors of rotary frequencies: the first ones turn, the others stand still.
    Turning { first: usize },
}

/// One tensor to write.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) name: String,
    /// GGUF order: columns first.
    pub(crate) shape: Vec<u64>,
    pub(crate) ty: Type,
    pub(crate) content: Content,
}

impl Planned {
    pub(crate) fn cols(&self) -> usize {
        self.shape[0] as usize
    }

    pub(crate) fn rows(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }

    #[cfg(test)]
    pub(crate) fn values(&self) -> usize {
        self.cols() * self.rows()
    }

    /// Bytes in the file; rows that do not fill blocks have none.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.ty.row_bytes(self.cols()).unwrap_or(0) * self.rows()
    }
}

/// llama.cpp's number for "mostly Q4_K, medium".
pub(crate) const Q4_K_M: u32 = 15;
/// llama.cpp's number for "mostly BF16".
pub(crate) const MOSTLY_BF16: u32 = 32;

/// Whether the Q4_K_M mix gives a layer's values and down-projections the larger type.
pub(crate) fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

#[derive(Debug, Default)]
pub(crate) struct List {
    pub(crate) tensors: Vec<Planned>,
}

impl List {
    pub(crate) fn push(&mut self, name: impl Into<String>, shape: &[usize], ty: Type, content: Content) {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        self.tensors.push(Planned { name: name.into(), shape, ty, content });
    }

    /// An F32 vector of one number.
    pub(crate) fn constant(&mut self, name: impl Into<String>, len: usize, value: f32) {
        self.push(name, &[len], Type::F32, Content::Constant(value));
    }

    /// Random values that keep the scale of their input.
    pub(crate) fn random(&mut self, name: impl Into<String>, shape: &[usize], ty: Type, residual: bool) {
        let std = (shape[0] as f32).sqrt().recip();
        self.push(name, shape, ty, Content::Random { std, residual });
    }
}
