ATTENTION_SEGMENT: int
QUANT_INPUT_BYTES: int

def features() -> tuple[str, ...]: ...
def pack_rows(weight: int, rows: int, k: int, packed: int, first_row: int, threads: int, /) -> None: ...
def linear(
    x: int,
    stride: int,
    packed: int,
    bias: int,
    y: int,
    m: int,
    n: int,
    k: int,
    y_is_float: bool,
    is_gated: bool,
    threads: int,
    /,
) -> None: ...
def quant_linear(
    x: int,
    stride: int,
    packed: int,
    bias: int,
    y: int,
    inputs: int,
    m: int,
    n: int,
    k: int,
    bits: int,
    offsets: bool,
    x_is_bf16: bool,
    y_is_bf16: bool,
    is_gated: bool,
    threads: int,
    /,
) -> None: ...
def rms_norm(
    x: int,
    outer: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    width: int,
    weight: int,
    residual: int,
    y: int,
    is_bf16: bool,
    threads: int,
    eps: float,
    /,
) -> None: ...
def rope(
    q: int,
    q_heads: int,
    q_token: int,
    q_head: int,
    k: int,
    k_heads: int,
    k_token: int,
    k_head: int,
    positions: int,
    cos_sin: int,
    tokens: int,
    rotary: int,
    is_bf16: bool,
    threads: int,
    /,
) -> None: ...
def silu_mul(x: int, stride: int, y: int, tokens: int, width: int, is_bf16: bool, threads: int, /) -> None: ...
def attention(
    plan: bytes,
    q: int,
    k: int,
    v: int,
    q_token: int,
    q_head: int,
    k_token: int,
    k_head: int,
    v_token: int,
    v_head: int,
    k_pages: int,
    v_pages: int,
    k_page: int,
    v_page: int,
    out: int,
    window: int,
    /,
) -> None: ...
def gather(table: int, ids: int, y: int, rows: int, row_bytes: int, /) -> None: ...
def peaks(x: int, rows: int, width: int, places: int, finite: int, threads: int, /) -> None: ...
def record() -> None: ...
def recorded() -> bytes: ...
def replay(ops: bytes, plan: bytes, threads: int, /) -> None: ...
