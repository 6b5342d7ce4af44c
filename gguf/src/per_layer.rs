use alloc::vec::Vec;

/// A setting that a file gives once for all layers, or once for each.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PerLayer<T> {
    /// The same value for all layers.
    All(T),
    /// One value for each layer, draft blocks included.
    Each(Vec<T>),
}

impl<T: Copy> PerLayer<T> {
    /// The value for a layer; none when the array is too short.
    pub fn at(&self, layer: usize) -> Option<T> {
        match self {
            Self::All(value) => Some(*value),
            Self::Each(values) => values.get(layer).copied(),
        }
    }

    /// Length of the array, when there is one value for each layer.
    pub fn layers(&self) -> Option<usize> {
        match self {
            Self::All(_) => None,
            Self::Each(values) => Some(values.len()),
        }
    }
}

impl PerLayer<usize> {
    /// The different values other than 0, ascending.
    ///
    /// Some files give 0 to layers that have no such thing (attention heads in a recurrent layer); a model whose other
    /// layers must agree takes the single value found here.
    pub fn distinct_nonzero(&self) -> Vec<usize> {
        let mut values = match self {
            Self::All(value) => alloc::vec![*value],
            Self::Each(values) => values.clone(),
        };
        values.retain(|&value| value != 0);
        values.sort_unstable();
        values.dedup();
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_or_one_for_each_layer() {
        let all = PerLayer::All(2);
        let each = PerLayer::Each(alloc::vec![0, 0, 0, 2, 0, 0, 0, 2]);
        assert_eq!((all.at(7), all.at(1000), all.layers()), (Some(2), Some(2), None));
        assert_eq!((each.at(2), each.at(3), each.at(8), each.layers()), (Some(0), Some(2), None, Some(8)));
        assert_eq!(all.distinct_nonzero(), [2]);
        assert_eq!(each.distinct_nonzero(), [2]);
        assert_eq!(PerLayer::Each(alloc::vec![4, 2, 0, 4]).distinct_nonzero(), [2, 4]);
        assert!(PerLayer::All(0).distinct_nonzero().is_empty());
    }
}
