import sys, json, os, torch, triton
sys.path.insert(0, ".")
from penstock.gpu.hopper import described, description, Tile
from penstock.recurrence.triton import dyadic_backward as dy
from dy_bench_lib import made
dev="cuda"
def desc(x,t): return described(x,description(x,t))
def ref(q,k,v,g,S,do,dE,u,scale):
    # one chunk [n,C,D] batched
    a=[x.double().requires_grad_() for x in (q,k,v,g,S)]+([u.double().requires_grad_()] if u is not None else [])
    q,k,v,g,s=a[:5]; o=[]
    for t in range(q.shape[1]):
        kv=k[:,t][:,:,None]*v[:,t][:,None]; n=torch.exp(g[:,t])[:,:,None]*s+kv
        o.append(torch.einsum("nk,nkv->nv",q[:,t],s+a[5][:,:,None]*kv if u is not None else n)); s=n
    o=torch.stack(o,1)*scale
    return torch.autograd.grad((o*do.double()).sum()+(s*dE.double()).sum(),a)
def run(B,T,H,D,mu,prev,maxnreg,warps,check,reps=20):
    q,k,v,g,u=made(B,T,H,D,mu); do=torch.randn_like(v); NC=B*T//64
    S=torch.randn(NC,H,D,D,device=dev).bfloat16(); dS=torch.randn(NC,H,D,D,device=dev).bfloat16()
    dq,dk,dv=(torch.empty_like(q) for _ in range(3)); dg=torch.empty_like(g); du=torch.empty(NC,H,D,device=dev)
    scale=D**-.5
    d=[desc(x,Tile(64,D)) for x in (q,k,v,do)]+[desc(x,Tile(D,D,3)) for x in (S.view(NC*1,H,D,D),dS.view(NC,H,D,D))]
    def go():
        dy.penstock_chunk_bwd_hopper[(NC*H,)](*d,g,u,dq,dk,dv,dg,du,q,scale,B,T,g.stride(0),g.stride(2),u.stride(0),u.stride(1),
          g_t=g.stride(1),g_k=1,H=H,K=D,DG=True,PREVIOUS=prev,PACKED=False,num_warps=warps,maxnreg=maxnreg)
    go(); torch.cuda.synchronize(); out={}
    if check:
        c=lambda x: x.view(NC,64,H,D)[:2].permute(0,2,1,3).reshape(-1,64,D)
        uu=u[None].expand(2,H,D).reshape(-1,D) if prev else None
        G=ref(c(q),c(k),c(v),c(g),S[:2].reshape(-1,D,D),c(do),dS[:2].reshape(-1,D,D),uu,scale)
        F=[c(x) for x in (dq,dk,dv,dg)]+([du[:2].reshape(-1,D)] if prev else [])
        W=list(G[:4])+([G[5]] if prev else [])
        out={n:"%.1e"%float((f.double()-w).norm()/w.norm()) for n,f,w in zip("dq dk dv dg du".split(),F,W)}
    graph=torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5): go()
    ts=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/5)
    return sorted(ts)[len(ts)//2],out
if __name__=="__main__":
    for D,sizes,warps,regs in ((64,(8,2048,32),8,(128,168,255)),(128,(4,2048,16),16,(128,)),(128,(4,2048,16),8,(255,))):
        for r in regs:
            for prev in (True,False):
                for mu in ("soft",2,"inf"):
                    if (r!=regs[0] or warps==8 and D==128) and (not prev or mu!="soft"): continue
                    try: t,e=run(*sizes,D,mu,prev,r,warps,True)
                    except Exception as x: print(D,warps,r,prev,mu,"FAILED",str(x)[-300:]); continue
                    print(D,"warps",warps,"maxnreg",r,"rwkv6" if prev else "gla",mu,"%.4f ms"%t,e,flush=True)
