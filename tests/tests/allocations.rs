//! A decoded token allocates nothing once the buffers have grown. Alone in its binary: the count is the process's.

use neuropil::{Engine, KvType, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::DType;
use neuropil_tests::counting_alloc::{CountingAlloc, allocations};
use neuropil_tests::toy::{Toy, ToyExperts, tokens};

#[global_allocator]
static ALLOC: CountingAlloc = CountingAlloc;

#[test]
fn a_decoded_token_allocates_nothing() {
    decoding_allocates_nothing(Toy { context: 1024, ..Toy::default() });
    // Some weights are expanded, of more than one width.
    decoding_allocates_nothing(Toy { dtypes: vec![("ffn", DType::Q3_K)], context: 1024, ..Toy::default() });
    // Experts have lists and buffers of their own.
    let experts = Some(ToyExperts { count: 6, used: 2, neurons: None, gating: None });
    decoding_allocates_nothing(Toy { experts, context: 1024, ..Toy::default() });
}

fn decoding_allocates_nothing(toy: Toy) {
    let (_dir, path) = toy.temp();
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let engine = Engine::builder(&path).backend(&cpu).unwrap().build().unwrap();
    // The second prompt is so long that threads share a head's attention.
    for (kv, prompt) in [(KvType::F16, 7), (KvType::F16, 583), (KvType::Q8_0, 583)] {
        let mut session = engine.session(SessionOptions { kv, ..SessionOptions::default() }).unwrap();
        session.prefill(&tokens("warm up").repeat(100)[..prompt]).unwrap();
        (0..20).for_each(|i| session.decode(i).unwrap());
        // Up to the end of a page of the cache, which the next token would leave.
        let before = allocations();
        (0..30).for_each(|i| session.decode(i).unwrap());
        assert_eq!(allocations() - before, 0, "{kv:?} from {prompt} tokens on");
    }
}
