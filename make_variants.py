import re
src=open('penstock/recurrence/triton/dyadic_forward.py').read().replace('from ...gpu','from penstock.gpu')
def w(name,s): open(f'variants/{name}.py','w').write(s)
w('base',src)
w('g8',src.replace('GROUPS = gl.constexpr(4)','GROUPS = gl.constexpr(8)').replace('R = gl.constexpr(16)  # of R','').replace('\nR = gl.constexpr(16)','\nR = gl.constexpr(8)'))
# instrumented
s=src
s=s.replace('''@gluon.jit
def publish(''','''@gluon.jit
def clock(x):
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish(''',1)
s=s.replace('''    mbarrier.wait(empty.index(s), (c * (TILES // 2 // PAIRS) + n // PAIRS) & 1 ^ 1)
''','''    t0 = clock(c)
    mbarrier.wait(empty.index(s), (c * (TILES // 2 // PAIRS) + n // PAIRS) & 1 ^ 1)
    t1 = clock(c)
''').replace('''    meet()
    mbarrier.arrive(full.index(s), count=1)

''','''    meet()
    mbarrier.arrive(full.index(s), count=1)
    return t1 - t0, clock(c)

''')
s=s.replace("bars = (loaded, full, empty, done)","bars = (loaded, full, empty, done, chunk_states + pid * 32)").replace("loaded, full, empty, _ = bars","loaded, full, empty, _, dbg = bars").replace("loaded, full, empty, done = bars","loaded, full, empty, done, dbg = bars")
s=s.replace('''    for c in range(chunks):
        s = c % STAGES
        left = tokens''','''    z = tokens * 0
    p0 = z; p1 = z; p2 = z; p3 = z; pl = z; e0 = z; e1 = z; e2 = z; e3 = z; ef = z
    start = clock(z)
    last_t = start
    for c in range(chunks):
        s = c % STAGES
        left = tokens''')
s=s.replace('''        mbarrier.wait(loaded.index(s), (c // STAGES) & 1)
        Q =''','''        ta = clock(c)
        mbarrier.wait(loaded.index(s), (c // STAGES) & 1)
        tb = clock(c)
        pl += tb - ta
        ef += ta - last_t
        last_t = tb
        Q =''')
s=s.replace('''            publish(X, Y, n, c, x_s, full, empty)
''','''            wt, nw = publish(X, Y, n, c, x_s, full, empty)
            if n == 0:
                p0 += wt
                e0 += nw - last_t - wt
            else:
                p1 += wt
                e1 += nw - last_t - wt
            last_t = nw
''')
s=s.replace('''                publish(E, X, n // 2, c, x_s, full, empty)
''','''                wt, nw = publish(E, X, n // 2, c, x_s, full, empty)
                if n == 1:
                    p0 += wt
                    e0 += nw - last_t - wt
                elif n == 3:
                    p1 += wt
                    e1 += nw - last_t - wt
                else:
                    p2 += wt
                    e2 += nw - last_t - wt
                last_t = nw
''')
for n in (3,):
    s=s.replace(f'''        publish(X, Y, {n}, c, x_s, full, empty)
''',f'''        wt, nw = publish(X, Y, {n}, c, x_s, full, empty)
        p{n} += wt
        e{n} += nw - last_t - wt
        last_t = nw
'''+('''    gl.store(dbg + 0, p0); gl.store(dbg + 1, p1); gl.store(dbg + 2, p2); gl.store(dbg + 3, p3); gl.store(dbg + 4, pl)
    gl.store(dbg + 5, ef); gl.store(dbg + 6, e0); gl.store(dbg + 7, e1); gl.store(dbg + 8, e2); gl.store(dbg + 9, e3); gl.store(dbg + 10, last_t - start)
''' if n==3 else ''))
# walker
s=s.replace('''    for c in range(chunks):
        s = c % STAGES
        phase''','''    z = tokens * 0
    p0 = z; p1 = z; p2 = z; p3 = z; e0 = z; e1 = z; e2 = z; e3 = z; e4 = z; e5 = z
    last_t = clock(z)
    for c in range(chunks):
        s = c % STAGES
        phase''')
s=s.replace('''            x, y = awaited(n, c, x_s, full)
''','''            ta = clock(c)
            x, y = awaited(n, c, x_s, full)
            tb = clock(c)
            if n == 0:
                p0 += tb - ta
                e0 += ta - last_t
            else:
                p1 += tb - ta
                e1 += ta - last_t
            last_t = tb
''')
s=s.replace('''        x, y = awaited(2, c, x_s, full)
''','''        ta = clock(c)
        x, y = awaited(2, c, x_s, full)
        tb = clock(c)
        p2 += tb - ta
        e2 += ta - last_t
        last_t = tb
''').replace('''        q, k = awaited(3, c, x_s, full)
''','''        ta = clock(c)
        q, k = awaited(3, c, x_s, full)
        tb = clock(c)
        p3 += tb - ta
        e3 += ta - last_t
        last_t = tb
''').replace('''        released(3, x_s, empty)
        tma.store_wait(0)
''','''        released(3, x_s, empty)
        ta = clock(c)
        e4 += ta - last_t
        last_t = ta
        tma.store_wait(0)
''')
s=s.replace('''    if FINAL:
        gl.store(last + dk''','''    gl.store(dbg + 16, p0); gl.store(dbg + 17, p1); gl.store(dbg + 18, p2); gl.store(dbg + 19, p3)
    gl.store(dbg + 20, e0); gl.store(dbg + 21, e1); gl.store(dbg + 22, e2); gl.store(dbg + 23, e3); gl.store(dbg + 24, e4)
    if FINAL:
        gl.store(last + dk''')
w('clocks',s)
# no math in the walker
a=src.index('        x = operand(k_s.index(s), False)'); b=src.index('        fence_async_shared()\n        meet()\n        O = warp')
e=src.index('        released(3, x_s, empty)')
t=src[:a]+'''        for n in gl.static_range(3):
            x, y = awaited(n, c, x_s, full)
            released(n, x_s, empty)
        q, k = awaited(3, c, x_s, full)
        O = S
'''+src[e:]
w('nowalk',t)
# no math in prepare
a=src.index('        through = gl.full([GROUPS, R, K], scale'); b=src.index('        if left < C:\n            Y = gl.where')
t=src[:a]+'''        for n in gl.static_range(3):
            publish(Q, Kt, n, c, x_s, full, empty)
        g += (g_t + left * 0).to(gl.int64) * C
        d = decays_at(g, g_t, g_k, left - C, K, layout)
        total_s.index(s).store(gl.reshape(gl.sum(part.load(gl.SliceLayout(1, grouped)), 0, keep_dims=True), [K]))
        X = Q
        Y = Kt
'''+src[b:]
w('noprep',t)
