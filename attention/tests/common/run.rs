use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norms, Position, Projections, Queries, Rope, Scratch, Span,
};
use skep_quant::Parallel;

use super::{Random, Sequence};

/// How sequences are run.
pub(crate) struct Run<'a> {
    pub heads: Heads,
    pub gated: bool,
    pub norms: Norms<'a>,
    pub rope: Option<&'a Rope>,
    pub mask: Mask,
    pub ty: KvType,
    pub page_len: usize,
    /// Order of pages and seed of the page tables.
    pub seed: u64,
}

impl Run<'_> {
    /// Runs `sequences` side by side, `cut(sequence, done)` rows of each in every batch, and returns the outputs `[len, q_heads, v_dim]`.
    pub(crate) fn outputs(
        &self,
        par: &dyn Parallel,
        scratch: &mut Scratch,
        sequences: &[Sequence],
        cut: impl Fn(usize, usize) -> usize,
    ) -> Vec<Vec<f32>> {
        let heads = &self.heads;
        let pages_of = |len: usize| len.div_ceil(self.page_len);
        let n_pages = sequences.iter().map(|s| pages_of(s.len)).sum::<usize>();
        let mut cache =
            KvCache::new(self.ty, n_pages, self.page_len, heads.kv_heads(), heads.head_dim(), heads.v_dim())
                .unwrap();
        let mut free = Random(self.seed).shuffled(n_pages);
        let tables =
            sequences.iter().map(|s| free.split_off(free.len() - pages_of(s.len))).collect::<Vec<_>>();
        let mut done = vec![0; sequences.len()];
        let mut outputs = vec![Vec::new(); sequences.len()];
        while sequences.iter().zip(&done).any(|(s, &done)| done < s.len) {
            let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
            let (mut positions, mut spans) = (Vec::new(), Vec::new());
            for (i, sequence) in sequences.iter().enumerate() {
                let rows = done[i]..(done[i] + cut(i, done[i])).min(sequence.len);
                let width = |data: &[f32]| data.len() / sequence.len;
                for (batch, data) in [(&mut q, &sequence.q), (&mut k, &sequence.k), (&mut v, &sequence.v)] {
                    batch.extend_from_slice(&data[rows.start * width(data)..rows.end * width(data)]);
                }
                let first = positions.len();
                positions.extend(rows.clone().map(|row| Position::from(row as u32)));
                spans.push(Span {
                    tokens: first..positions.len(),
                    pages: &tables[i],
                    start: rows.start,
                    together: &[],
                });
            }
            let n = positions.len();
            let queries = if self.gated { Queries::GateInterleaved(&q) } else { Queries::Plain(&q) };
            let mut q_out = vec![f32::NAN; n * heads.q_heads() * heads.head_dim()];
            let projections = Projections { q: queries, k: &k, v: &v };
            skep_attention::prepare(
                par,
                heads,
                &projections,
                &self.norms,
                self.rope,
                &positions,
                &spans,
                &mut cache,
                scratch,
                &mut q_out,
            )
            .unwrap();
            let mut out = vec![f32::NAN; n * heads.q_heads() * heads.v_dim()];
            let gate = self.gated.then_some(Gate::Interleaved(&q));
            skep_attention::attend(par, heads, &q_out, gate, &spans, &cache, self.mask, scratch, &mut out)
                .unwrap();
            let width = heads.q_heads() * heads.v_dim();
            for (i, span) in spans.iter().enumerate() {
                outputs[i].extend_from_slice(&out[span.tokens.start * width..span.tokens.end * width]);
                done[i] += span.tokens.len();
            }
        }
        outputs
    }
}
