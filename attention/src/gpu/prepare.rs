use super::{Batch, Cache, Kernels, Norm, Norms, Projections, Queries, RopeTable, Rows, check_heads, words};
use crate::Heads;
use skep_hal::Result;
use skep_hal::gpu::{Args, Stream, View};

/// Heads of a row that a block takes.
const HEADS: usize = 8;

impl Kernels {
    /// Normalises and rotates the queries of a step into `q_out`, its keys and values into the pages of the cache, as
    /// [`prepare`](crate::prepare()).
    ///
    /// * `rope`: angles of the step's rows, none for layers without;
    /// * `q_out`: floats `[rows, q_heads, head_dim]`.
    ///
    /// Two rows must not have the same place in the cache.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When a view is too short, or the heads, cache or rope do not fit each other.
    pub fn prepare(
        &self,
        stream: &Stream,
        heads: &Heads,
        projections: &Projections<'_>,
        norms: &Norms<'_>,
        rope: Option<&RopeTable>,
        batch: &Batch<'_>,
        cache: &Cache,
        q_out: View<'_>,
    ) -> Result<()> {
        cache.check(heads);
        let (rows, kv_heads) = (batch.rows, heads.kv_heads());
        projections.k.check("k", rows, kv_heads * heads.head_dim());
        projections.v.check("v", rows, kv_heads * heads.v_dim());
        self.prepare_any(
            stream,
            heads,
            projections.q,
            Some((projections.k, projections.v, cache)),
            norms,
            rope,
            batch,
            q_out,
        )
    }

    /// Normalises and rotates the queries of a step into `q_out`, for a layer that reads the keys and values of another, as
    /// [`prepare_queries`](crate::prepare_queries()).
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When a view is too short, or the heads and rope do not fit each other.
    pub fn prepare_queries(
        &self,
        stream: &Stream,
        heads: &Heads,
        queries: Queries<'_>,
        q_norm: Norm<'_>,
        eps: f32,
        rope: Option<&RopeTable>,
        batch: &Batch<'_>,
        q_out: View<'_>,
    ) -> Result<()> {
        let norms = Norms { q: q_norm, eps, ..Norms::default() };
        self.prepare_any(stream, heads, queries, None, &norms, rope, batch, q_out)
    }

    fn prepare_any(
        &self,
        stream: &Stream,
        heads: &Heads,
        queries: Queries<'_>,
        kv: Option<(Rows<'_>, Rows<'_>, &Cache)>,
        norms: &Norms<'_>,
        rope: Option<&RopeTable>,
        batch: &Batch<'_>,
        q_out: View<'_>,
    ) -> Result<()> {
        check_heads(heads);
        batch.check();
        let (rows, q_heads, head_dim, v_dim) = (batch.rows, heads.q_heads(), heads.head_dim(), heads.v_dim());
        let (q, q_head) = match queries {
            Queries::Plain(q) => (q, head_dim),
            Queries::GateInterleaved(q) => (q, 2 * head_dim),
        };
        q.check("q", rows, q_heads * q_head);
        words("q_out", q_out, rows * q_heads * head_dim);
        if let Some(rope) = rope {
            rope.check(head_dim, rows);
        }
        let (q_normed, q_weight) = norms.q.check("q norm weight", head_dim);
        let (k_normed, k_weight) = norms.k.check("k norm weight", head_dim);
        let (v_normed, v_weight) = norms.v.check("v norm weight", v_dim);
        let normed = u32::from(q_normed) | u32::from(k_normed) << 1 | u32::from(v_normed) << 2;
        let kv_heads = if kv.is_some() { heads.kv_heads() } else { 0 };
        let (k, v) = (kv.map(|kv| kv.0), kv.map(|kv| kv.1));
        let cache = kv.map(|kv| kv.2);
        let args = Args::new()
            .view(q.view)
            .maybe(k.map(|k| k.view))
            .maybe(v.map(|v| v.view))
            .maybe(q_weight)
            .maybe(k_weight)
            .maybe(v_weight)
            .maybe(rope.map(RopeTable::view))
            .view(batch.slot)
            .view(batch.position)
            .view(batch.pages)
            .view(q_out)
            .maybe(cache.map(Cache::keys))
            .maybe(cache.map(Cache::values))
            .len(q.stride)
            .len(q_head)
            .len(k.map_or(0, |k| k.stride))
            .len(v.map_or(0, |v| v.stride))
            .u32(normed)
            .len(rope.map_or(0, RopeTable::pairs))
            .len(q_heads)
            .len(kv_heads)
            .len(head_dim)
            .len(v_dim)
            .len(batch.slots)
            .len(batch.max_pages)
            .len(cache.map_or(0, Cache::n_pages))
            .f32(norms.eps);
        let kernel = &cache.map_or(&self.f16, |cache| self.typed(cache)).prepare;
        let blocks = (q_heads + 2 * kv_heads).div_ceil(HEADS) as u32;
        let rows = u32::try_from(rows).expect("rows that kernels count in 32 bits");
        // SAFETY: the views were checked against the shapes. A row is written to a page only if its slot, the table's entry and the page
        // exist.
        unsafe { kernel.launch(stream, [rows, blocks, 1], &args) }
    }
}
