use alloc::vec::Vec;
use core::ops::Range;

use crate::Routes;

/// The (token, rank) pairs of a batch in expert order; within an expert in token, then rank order.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Experts with at least one pair, ascending.
    pub(super) active: Vec<Group>,
    /// Token of each pair.
    pub(super) tokens: Vec<u32>,
    /// `[n_tokens, top_k]`: where the pair is in expert order.
    pub(super) places: Vec<u32>,
    /// 0, 1, 2 …, as many as pairs.
    pub(super) numbers: Vec<u32>,
    /// Per expert, where its next pair goes.
    next: Vec<u32>,
}

/// The pairs of one expert.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) expert: u32,
    pub(super) pairs: Range<usize>,
}

impl Groups {
    /// A counting sort.
    pub(super) fn sort(&mut self, n_experts: usize, routes: &Routes) {
        let ids = routes.experts();
        self.next.clear();
        self.next.resize(n_experts, 0);
        for &id in ids {
            assert!((id as usize) < n_experts, "a route names expert {id} of {n_experts}");
            self.next[id as usize] += 1;
        }
        self.active.clear();
        let mut start = 0;
        for (expert, next) in (0..).zip(&mut self.next) {
            let count = core::mem::replace(next, start as u32) as usize;
            if count > 0 {
                self.active.push(Group { expert, pairs: start..start + count });
                start += count;
            }
        }
        self.tokens.clear();
        self.tokens.resize(ids.len(), 0);
        self.places.clear();
        for (token, ids) in (0..).zip(ids.chunks_exact(routes.top_k())) {
            for &id in ids {
                let place = self.next[id as usize];
                self.next[id as usize] += 1;
                self.tokens[place as usize] = token;
                self.places.push(place);
            }
        }
        if self.numbers.len() < ids.len() {
            self.numbers = (0..ids.len() as u32).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn pairs_are_sorted_by_expert_then_token() {
        let routes = Routes::from_parts(2, vec![3, 1, 1, 3, 0, 3], vec![0.0; 6]).unwrap();
        let mut groups = Groups::default();
        for _ in 0..2 {
            groups.sort(5, &routes);
            let active: Vec<_> = groups.active.iter().map(|g| (g.expert, g.pairs.clone())).collect();
            assert_eq!(active, [(0, 0..1), (1, 1..3), (3, 3..6)]);
            assert_eq!(groups.tokens, [2, 0, 1, 0, 1, 2]);
            assert_eq!(groups.places, [3, 1, 2, 4, 0, 5]);
            assert!(groups.numbers.starts_with(&[0, 1, 2, 3, 4, 5]));
        }
    }

    #[test]
    #[should_panic(expected = "a route names expert 5 of 5")]
    fn an_expert_that_does_not_exist_is_refused() {
        Groups::default().sort(5, &Routes::from_parts(1, vec![5], vec![1.0]).unwrap());
    }
}
