import re
src=open('penstock/recurrence/triton/dyadic_forward.py').read().replace('from ...gpu','from penstock.gpu')
def w(name,s): open(f'variants/{name}.py','w').write(s)
w('base',src)
w('g8',src.replace('GROUPS = gl.constexpr(4)','GROUPS = gl.constexpr(8)').replace('R = gl.constexpr(16)  # of R','').replace('\nR = gl.constexpr(16)','\nR = gl.constexpr(8)'))

a=src.index('        x = operand(k_s.index(s), False)'); b=src.index('        if c > 0:\n            if c - 1 + STAGES'); c_=src.index('        D = gl.convert_layout(gl.reshape(D'); d_=src.index("        v = v_s.index(s * BLOCKS + BLOCK)\n"); e_=src.index('        S = S * total_s'); f_=src.index('        released(3, x_s, empty)')
w('nowalk',src[:a]+"""        for n in gl.static_range(2):
            x, y = awaited(n, c, zero, x_s, full)
            released(n, x_s, empty)
"""+src[b:c_]+"""        x, y = awaited(2, c, zero, x_s, full)
        released(2, x_s, empty)
"""+src[d_:e_]+"        O = S\n"+src[f_:])
a=src.index('        for n in gl.static_range(LEVELS):\n            if 1 << n < R'); b=src.index('            if n % 2 == 0:\n                E = X'); c_=src.index('        before, after, whole = around'); d_=src.index('        if left < C:\n            Y = gl.where')
w('noprep',src[:a]+"""        total_s.index(s).store(gl.reshape(gl.sum(part.load(gl.SliceLayout(1, grouped)), 0, keep_dims=True), [K]))
        for n in gl.static_range(LEVELS):
            X = Q
"""+src[b:c_]+"        X = Q\n        Y = Kt\n"+src[d_:])
