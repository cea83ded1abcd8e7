import importlib, json, os, torch, triton
import dy_bench_lib as L
runs = eval(os.environ["RUNS"])
for name, D, var in runs:
    L.dy = importlib.import_module("variants." + name)
    shape = {64: (8, 2048, 32), 128: (4, 2048, 16)}[D]
    try:
        if name not in ("nowalk", "noprep", "clocks"):
            worst = 0.
            for prev in (False, True):
                for mu in ("soft", 2, "inf"):
                    small = (2, 200, 2)
                    q, k, v, g, u = L.made(*small, D, mu)
                    st = torch.randn(small[0], small[2], D, D, device="cuda")
                    go, o, f, scale = L.call(q, k, v, g, u if prev else None, *var, state=st)
                    go(); torch.cuda.synchronize()
                    wo, wf = L.oracle(q, k, v, g, u if prev else None, scale, st)
                    worst = max(worst, *[float((a.double() - b).norm() / b.norm()) for a, b in ((o, wo), (f, wf))])
        else: worst = float("nan")
        row = []
        for prev in (False, True):
            q, k, v, g, u = L.made(*shape, D, "soft")
            go, o, f, scale = L.call(q, k, v, g, u if prev else None, *var)
            if name == "clocks":
                dbg = torch.zeros(100000, dtype=torch.int32, device="cuda")
                fn = L.dy.penstock_chunk_fwd_hopper
                class W:
                    def __getitem__(self, grid):
                        def run(*a, **k):
                            a = list(a); a[9] = dbg
                            return fn[grid](*a, **k)
                        return run
                L.dy.penstock_chunk_fwd_hopper = W()
                go(); go(); torch.cuda.synchronize()
                L.dy.penstock_chunk_fwd_hopper = fn
                x = dbg[:256 * 32].view(256, 32).float().mean(0) / 32
                print("prepare waits p0..p3, loaded", [round(float(y)) for y in x[:5]], "work front,e0..e3", [round(float(y)) for y in x[5:10]], "period", round(float(x[10])))
                print("walker waits", [round(float(y)) for y in x[16:20]], "work e0..e3, final", [round(float(y)) for y in x[20:25]])
            else:
                row.append(triton.testing.do_bench(go, warmup=10, rep=60, return_mode="median"))
        print(name, D, var, "%.2e" % worst, " ".join("%.4f" % x for x in row), flush=True)
    except Exception as e:
        print(name, D, var, "FAILED", repr(e)[:300], flush=True)
