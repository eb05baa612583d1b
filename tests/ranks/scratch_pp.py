import sys, time
from tests.ranks.harness import run_ranks
from tests.ranks.bitwise_cases import CASES, train
def go(names, strategies):
    out={}
    for s in strategies:
        for n in names:
            t=time.time()
            try: out[n,s]=(train(CASES[n], s), time.time()-t)
            except Exception as e:
                import traceback
                raise RuntimeError(f'{n} {s}') from e
    return out
if __name__=='__main__':
    names=sys.argv[1].split('+'); world=int(sys.argv[2]); strategies=sys.argv[3].split('+')
    alone={n: o for (n,_),o in run_ranks(go,1,names,['dp'],timeout_s=300)[0].items()}
    for s in strategies:
      for n in names:
        try:
            r=run_ranks(go,world,[n],[s],timeout_s=200)[0]
        except BaseException as e:
            print(n,s,'ERROR',str(e)[-1500:]); continue
        o,t=r[n,s]
        print(n,s,'EQUAL' if o==alone[n][0] else ('DIFF', alone[n][0], o), round(t,1), flush=True)
