import sys; sys.path.insert(0,'/tmp/emu'); sys.path.insert(0,'/tmp/wt/dyadic')
import torch, time, math
import gluon as emu
from penstock.verify.inputs import inputs, Shape
from penstock.recurrence.triton import dyadic_forward as dy
from penstock.recurrence import chunkwise
def run(x, slots=4, stages=2, blocks=1, warps=4, state=None):
    B,T,H,K=x.q.shape; V=x.v.shape[3]
    out=torch.full((B,T,H,V),float('nan'),dtype=torch.bfloat16); fin=torch.full((B,H,K,V),float('nan'))
    m=lambda y: torch.as_strided(y,(B*T,H*y.shape[3]),(y.stride(1),1))
    D=lambda y,c: emu.Descriptor(m(y),(64,c))
    g=x.g.expand(x.q.shape); u=x.u if x.u is not None else x.q
    st=state.stride() if state is not None else (0,0,0,0)
    nums=[x.scale,B,T,0,H,*g.stride(),*((u.stride()) if x.u is not None else (0,0)),*st]
    emu.launch(dy.penstock_chunk_fwd_hopper, B*H*V//(64*blocks), [D(x.q,K),D(x.k,K),D(x.v,64),D(out,64),g,u,state if state is not None else x.q,out,fin,x.q,x.q,*nums],
      dict(K=K,V=V,SEGMENTS=False,PREVIOUS=x.u is not None,INITIAL=state is not None,FINAL=True,EVERY=0,PACKED=False,BLOCKS=blocks,STAGES=stages,SLOTS=slots,WARPS=warps,REGISTERS=120), warps=4, seed=1)
    return out, fin
from dataclasses import replace
gates={"soft":lambda g: g,"strong":lambda g: -torch.exp(torch.randn_like(g)*1+2),"-inf":lambda g: torch.where(torch.rand_like(g)<.1,-torch.inf,-.001),"zero":lambda g: g*0}
for variant in ("gla","rwkv6"):
    for shape,blocks,warps in (("1,150,2,64",1,4),("1,128,1,128",2,8)):
        for name,gf in gates.items():
            x=inputs(variant,Shape.parse(shape),torch.bfloat16,soft=True); x=replace(x,g=gf(x.g))
            st=torch.randn(x.shape.state)
            t0=time.time(); o,f=run(x,blocks=blocks,warps=warps,state=st)
            want=chunkwise.forward(x.problem().with_tensors({**{n:y.double() for n,y in x.tensors.items()},"initial_state":st.double()}))
            e=(o.double()-want[0]).norm()/want[0].norm(); e2=(f.double()-want[1]).norm()/want[1].norm()
            print(variant,shape,name,"%.2e %.2e"%(float(e),float(e2)), "%.1fs"%(time.time()-t0))
