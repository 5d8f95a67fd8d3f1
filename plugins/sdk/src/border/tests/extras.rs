//! What a plugin may offer besides multiplying: imported memory, saved plans, submission, blocks of neurons.

use super::*;

#[test]
fn memory_is_imported_and_jobs_lie_in_it() {
    let device = open();
    let weight = prepare(device, &matrix(&[1.0, 2.0])).unwrap();
    #[repr(align(64))]
    struct Aligned([f32; 16]);
    let mut bytes = Aligned([0.0; 16]);
    let good = NpRegion {
        kind: NP_MEMORY_HOST,
        host: bytes.0.as_mut_ptr().cast(),
        fd: -1,
        bytes: 64,
        ..NpRegion::new()
    };
    let import = |region: &NpRegion| {
        let mut memory = null_mut();
        // SAFETY: all pointers are good for the call.
        let (code, ..) = call(|s| unsafe { table().import_memory.unwrap()(device, region, &mut memory, s) });
        (code, memory)
    };
    assert_eq!(import(&NpRegion { bytes: 63, ..good }).0, NP_INVALID);
    assert_eq!(import(&NpRegion { host: null_mut(), ..good }).0, NP_INVALID);
    assert_eq!(import(&NpRegion { kind: 3, ..good }).0, NP_UNSUPPORTED);
    let memory = import(&good).1;
    let run = |offset| {
        let mut ys = [0.0f32];
        let y = NpBuffer { memory, memory_offset: offset, ..buffer(&mut ys) };
        let (code, ..) = matmul(device, weight, |_, _, product| product.y = &y);
        (code, ys[0])
    };
    assert_eq!((run(60), run(61), run(u64::MAX)), ((NP_OK, 2.0), (NP_INVALID, 0.0), (NP_INVALID, 0.0)));
    // SAFETY: given back twice, which is looked up.
    unsafe {
        table().release_memory.unwrap()(device, memory);
        table().release_memory.unwrap()(device, memory);
    }
    assert_eq!(run(60).0, NP_INVALID);
}

#[test]
fn plans_are_saved_loaded_and_checked() {
    unsafe extern "C" fn write(context: *mut c_void, data: *const c_void, bytes: u64) -> i32 {
        // SAFETY: the context is the list below, and the plugin vouches for the bytes.
        unsafe {
            let plan = &mut *context.cast::<Vec<u8>>();
            plan.extend_from_slice(std::slice::from_raw_parts(data.cast(), bytes as usize));
            i32::from(plan.len() > 70)
        }
    }
    let device = open();
    let save = |columns: usize| {
        let weight = prepare(device, &matrix(&vec![3.0; columns])).unwrap();
        let mut plan = Vec::<u8>::new();
        let context = (&raw mut plan).cast();
        // SAFETY: all pointers are good for the call.
        let said = call(|s| unsafe { table().save_plan.unwrap()(device, weight, context, Some(write), s) });
        (said.0, plan)
    };
    let load = |bytes: &[u8]| {
        let (data, data_bytes) = (bytes.as_ptr().cast(), bytes.len() as u64);
        let plan = NpPlan { data, data_bytes, ..NpPlan::new() };
        let mut prepared = NpPrepared::new();
        // SAFETY: all pointers are good for the call.
        let (code, ..) = call(|s| unsafe { table().load_plan.unwrap()(device, &plan, &mut prepared, s) });
        (code, prepared.weight)
    };
    let (code, mut plan) = save(2);
    assert_eq!(code, NP_OK);
    let (code, weight) = load(&plan);
    assert_eq!((code, matmul(device, weight, |_, _, _| {}).2), (NP_OK, 3.0));
    plan[41] ^= 1;
    assert_eq!(load(&plan).0, NP_INVALID);
    assert_eq!(save(200).0, NP_CANCELLED);
}

#[test]
fn submitted_jobs_are_told_once_whatever_their_end() {
    unsafe extern "C" fn done(context: *mut c_void, status: *const NpStatus, report: *const NpReport) {
        // SAFETY: the context is the sender below; the plugin vouches for the others.
        unsafe {
            let flags = report.as_ref().unwrap().flags;
            // A copy of its own: who is told may drop the other before this returns.
            let told = (*context.cast::<Sender<(i32, u32)>>()).clone();
            told.send(((*status).code, flags)).unwrap();
        }
    }
    let device = open();
    let (mut told, ended) = channel::<(i32, u32)>();
    let completion =
        NpCompletion { context: (&raw mut told).cast(), done: Some(done), ..NpCompletion::new() };
    let mut report = Vec::new();
    for value in [1.0, 666.0, 404.0] {
        let weight = prepare(device, &matrix(&[value, 0.0])).unwrap();
        let (mut xs, mut ys) = ([1.0f32; 2], [9.0f32; 1]);
        let (x, y) = (buffer(&mut xs), buffer(&mut ys));
        let product = NpProduct { weight, y: &y, ..NpProduct::new() };
        let list = [&raw const product];
        let products = list.as_ptr();
        let job = NpMatmulJob { tokens: 1, x: &x, products, product_count: 1, ..NpMatmulJob::new() };
        // SAFETY: what the job names lives until the completion came, below.
        let said = call(|s| unsafe { table().submit_matmul.unwrap()(device, &job, &completion, s) });
        assert_eq!(said.0, NP_OK);
        report.push(ended.recv().unwrap());
    }
    assert_eq!(report, [(NP_OK, NP_REPORT_ZERO_COPY_INPUT), (NP_INTERNAL, 0), (NP_LOST, 0)]);
    let nobody = NpCompletion { done: None, ..completion };
    // SAFETY: it is refused.
    let said = call(|s| unsafe { table().submit_matmul.unwrap()(device, null(), &nobody, s) });
    assert_eq!(said.0, NP_INVALID);
}

#[test]
fn a_block_of_neurons_runs_with_the_buffers_of_its_stage() {
    let device = open();
    let [gate, down] = [matrix(&[1.0, 2.0]), matrix(&[1.0, 2.0])];
    let down = NpMatrix { rows: 2, cols: 1, ..down };
    let source = NpWeightSource { gate: &gate, up: &gate, down: &down, ..NpWeightSource::new() };
    let mut prepared = NpPrepared::new();
    // SAFETY: all pointers are good for the call.
    let said = call(|s| unsafe { table().prepare.unwrap()(device, &source, &mut prepared, s) });
    assert_eq!(said.0, NP_OK);
    let (mut xs, mut hs, mut ys) = ([1.0f32; 2], [0.0f32; 1], [0.0f32; 2]);
    let (x, hidden, y) = (buffer(&mut xs), buffer(&mut hs), buffer(&mut ys));
    let good = NpClusterJob {
        stage: NP_STAGE_FUSED,
        activation: NP_ACT_SILU,
        tokens: 1,
        weight: prepared.weight,
        x: &x,
        y: &y,
        ..NpClusterJob::new()
    };
    let run = |job: NpClusterJob| {
        let mut report = NpReport::new();
        // SAFETY: all pointers are NULL or good for the call.
        call(|s| unsafe { table().cluster.unwrap()(device, &job, &mut report, s) }).0
    };
    assert_eq!(run(good), NP_OK);
    assert_eq!(run(NpClusterJob { y: null(), ..good }), NP_INVALID);
    assert_eq!(run(NpClusterJob { y: &x, ..good }), NP_INVALID);
    assert_eq!(run(NpClusterJob { y: &hidden, ..good }), NP_INVALID);
    assert_eq!(run(NpClusterJob { stage: NP_STAGE_GATE_UP, ..good }), NP_INVALID);
    assert_eq!(run(NpClusterJob { stage: NP_STAGE_GATE_UP, hidden: &hidden, y: null(), ..good }), NP_OK);
    assert_eq!(run(NpClusterJob { stage: 9, ..good }), NP_UNSUPPORTED);
    assert_eq!((hs, ys), ([5.0], [5.0; 2]));
    assert_eq!(matmul(device, prepared.weight, |_, _, _| {}).0, NP_INVALID);
}
