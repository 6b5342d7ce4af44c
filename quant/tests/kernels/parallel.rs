use skep_quant::{Parallel, Serial, Threads, for_each_chunk_mut};

#[test]
fn chunks_cover_the_slice_once() {
    for par in [&Serial as &dyn Parallel, &Threads(3)] {
        for len in [0usize, 1, 7, 8, 9, 100] {
            let mut data = vec![0usize; len];
            for_each_chunk_mut(par, &mut data, 8, |i, chunk| {
                assert!(chunk.len() == 8 || (i == len / 8 && chunk.len() == len % 8));
                for (k, x) in chunk.iter_mut().enumerate() {
                    *x += i * 8 + k + 1;
                }
            });
            assert!(data.iter().enumerate().all(|(i, x)| *x == i + 1));
        }
    }
}

#[test]
#[should_panic(expected = "chunk length is zero")]
fn a_zero_chunk_length_is_refused() {
    for_each_chunk_mut(&Serial, &mut [0u8; 4], 0, |_, _| {});
}
