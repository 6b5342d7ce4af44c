//! The attention kernel that every instruction set compiles for itself.
//!
//! Everything is turned round, so that a vector holds one number of many queries: scores are `[keys, queries]`, sums
//! `[dim, queries]`. Maximum, exponential and sum of the softmax are then done lane by lane, queries never mix, and both
//! products are a broadcast and two multiply-adds for two loaded vectors. Keys come in blocks, with the running maximum
//! and sum of Milakov and Gimelshein (2018).

/// Defines `attend` and `gate` for a module with a vector type `V` of `LANES` floats, `TILE`, the keys and dimensions of
/// an inner tile, and the operations `load`, `store`, `splat`, `add`, `sub`, `mul`, `fma`, `max` and `exp`.
macro_rules! kernels {
    ($features:literal) => {
        const QUERIES: usize = 2 * LANES;
        /// Keys taken into account at a time: with their values and scores they stay in the first-level cache.
        const SPAN: usize = BLOCK / 2;

        /// One number of each query.
        #[derive(Clone, Copy)]
        #[repr(C, align(64))]
        struct Row([[f32; LANES]; 2]);

        impl Row {
            const ZERO: Self = Self([[0.0; LANES]; 2]);
        }

        /// As many queries as fill two vectors, on their way through the keys.
        struct Lane {
            /// `[dim]`
            queries: Vec<Row>,
            /// `[dim]`
            sums: Vec<Row>,
            largest: [V; 2],
            total: [V; 2],
        }

        #[target_feature(enable = $features)]
        pub(crate) fn attend(heads: &Heads<'_>, block: usize, out: &mut [f32]) {
            let (dim, row) = (heads.dim, heads.heads * heads.dim);
            let mut scores = [Row::ZERO; SPAN];
            let mut lanes = Vec::new();
            for _ in 0..(out.len() / row).div_ceil(QUERIES) {
                let (queries, sums) = (vec![Row::ZERO; dim], vec![Row::ZERO; dim]);
                lanes.push(Lane { queries, sums, largest: [splat(0.0); 2], total: [splat(0.0); 2] });
            }
            for head in 0..heads.heads {
                let q = heads.block(heads.q, block, head).chunks(QUERIES * dim);
                for (lane, q) in lanes.iter_mut().zip(q) {
                    begin(lane, q);
                }
                for block in 0..heads.blocks() {
                    let k = heads.block(heads.k, block, head).chunks(SPAN * dim);
                    let v = heads.block(heads.v, block, head).chunks(SPAN * dim);
                    for (k, v) in k.zip(v) {
                        for lane in &mut lanes {
                            pass(lane, k, v, &mut scores[..k.len() / dim]);
                        }
                    }
                }
                for (lane, out) in lanes.iter().zip(out.chunks_mut(QUERIES * row)) {
                    finish(lane, row, head * dim, out);
                }
            }
        }

        /// Turns the queries round and forgets what was before.
        #[inline]
        #[target_feature(enable = $features)]
        fn begin(lane: &mut Lane, q: &[f32]) {
            for (i, q) in q.chunks_exact(lane.queries.len()).enumerate() {
                for (row, q) in lane.queries.iter_mut().zip(q) {
                    row.0[i / LANES][i % LANES] = *q;
                }
            }
            lane.sums.fill(Row::ZERO);
            lane.largest = [splat(f32::NEG_INFINITY); 2];
            lane.total = [splat(0.0); 2];
        }

        /// Takes some keys and their values into account.
        #[inline]
        #[target_feature(enable = $features)]
        fn pass(lane: &mut Lane, k: &[f32], v: &[f32], scores: &mut [Row]) {
            let before = lane.largest;
            let largest = score(&lane.queries, k, scores, before);
            let (mut scale, mut total) = (before, lane.total);
            for i in 0..2 {
                scale[i] = exp(sub(before[i], largest[i]));
                total[i] = mul(total[i], scale[i]);
            }
            for score in &mut *scores {
                for i in 0..2 {
                    let p = exp(sub(load(&score.0[i]), largest[i]));
                    total[i] = add(total[i], p);
                    store(&mut score.0[i], p);
                }
            }
            accumulate(scores, v, scale, &mut lane.sums);
            (lane.largest, lane.total) = (largest, total);
        }

        /// Writes the means of the values to `[tokens, row]`, from column `at` on.
        #[inline]
        #[target_feature(enable = $features)]
        fn finish(lane: &Lane, row: usize, at: usize, out: &mut [f32]) {
            let mut totals = Row::ZERO;
            store(&mut totals.0[0], lane.total[0]);
            store(&mut totals.0[1], lane.total[1]);
            for (i, out) in out.chunks_exact_mut(row).enumerate() {
                let total = totals.0[i / LANES][i % LANES];
                for (out, sum) in out[at..].iter_mut().zip(&lane.sums) {
                    *out = sum.0[i / LANES][i % LANES] / total;
                }
            }
        }

        /// The products of all queries with the keys; returns the largest so far.
        #[inline]
        #[target_feature(enable = $features)]
        fn score(queries: &[Row], k: &[f32], scores: &mut [Row], mut largest: [V; 2]) -> [V; 2] {
            let dim = queries.len();
            let (tiles, rest) = scores.as_chunks_mut::<TILE>();
            let (k, k_rest) = k.split_at(tiles.len() * TILE * dim);
            for (scores, k) in tiles.iter_mut().zip(k.chunks_exact(TILE * dim)) {
                largest = score_tile(queries, k, scores, largest);
            }
            for (score, k) in rest.iter_mut().zip(k_rest.chunks_exact(dim)) {
                largest = score_tile(queries, k, core::array::from_mut(score), largest);
            }
            largest
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn score_tile<const N: usize>(
            queries: &[Row],
            k: &[f32],
            scores: &mut [Row; N],
            mut largest: [V; 2],
        ) -> [V; 2] {
            let dim = queries.len();
            let k: [&[f32]; N] = core::array::from_fn(|i| &k[i * dim..][..dim]);
            let mut tile = [[splat(0.0); 2]; N];
            for (d, q) in queries.iter().enumerate() {
                let q = [load(&q.0[0]), load(&q.0[1])];
                for i in 0..N {
                    let k = splat(k[i][d]);
                    tile[i] = [fma(k, q[0], tile[i][0]), fma(k, q[1], tile[i][1])];
                }
            }
            for i in 0..N {
                for half in 0..2 {
                    largest[half] = max(tile[i][half], largest[half]);
                    store(&mut scores[i].0[half], tile[i][half]);
                }
            }
            largest
        }

        /// `sums = scale * sums + v p`
        #[inline]
        #[target_feature(enable = $features)]
        fn accumulate(p: &[Row], v: &[f32], scale: [V; 2], sums: &mut [Row]) {
            let dim = sums.len();
            let (tiles, rest) = sums.as_chunks_mut::<TILE>();
            let done = tiles.len() * TILE;
            for (i, sums) in tiles.iter_mut().enumerate() {
                accumulate_tile(p, v, dim, i * TILE, scale, sums);
            }
            for (i, sum) in rest.iter_mut().enumerate() {
                accumulate_tile(p, v, dim, done + i, scale, core::array::from_mut(sum));
            }
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn accumulate_tile<const N: usize>(
            p: &[Row],
            v: &[f32],
            dim: usize,
            at: usize,
            scale: [V; 2],
            sums: &mut [Row; N],
        ) {
            let mut tile = [[splat(0.0); 2]; N];
            for i in 0..N {
                for half in 0..2 {
                    tile[i][half] = mul(load(&sums[i].0[half]), scale[half]);
                }
            }
            for (p, v) in p.iter().zip(v.chunks_exact(dim)) {
                let v = &v[at..at + N];
                let p = [load(&p.0[0]), load(&p.0[1])];
                for i in 0..N {
                    let v = splat(v[i]);
                    tile[i] = [fma(v, p[0], tile[i][0]), fma(v, p[1], tile[i][1])];
                }
            }
            for i in 0..N {
                for half in 0..2 {
                    store(&mut sums[i].0[half], tile[i][half]);
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(crate) fn gate(activation: Activation, gate: &mut [f32], up: &[f32]) {
            super::scalar::gate(activation, gate, up);
        }
    };
}

pub(super) use kernels;
